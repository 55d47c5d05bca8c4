"""Run what can run on a release of vLLM that is not installed: `python -m scripts.vllm_lane 0.33 [PYTEST ARGUMENTS]`.

A release may be on the package index for GPUs weeks before it is there for CPUs. Then its Python is put in front of the
installed engine's compiled code: a *chimera*, good for everything that is decided in Python, and no proof that the real
release runs. Where the installed release is the wanted one, the same tests run on it as it is.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from scripts.vllm_contract.releases import CACHE, Release, UnavailableError, fetch, installed
from vllm_antkv.releases import SUPPORTED

ROOT = Path(__file__).parents[1]
#: What runs on a chimera, and what that shows.
PARTS: dict[str, str] = {
    "tests/serving/test_hooks.py": "the hooks fit and install",
    "tests/serving/test_recency_spec.py": "no decision of vLLM's about recency pages is inherited",
    "tests/contract/test_v2_block_tables.py": "model runner V2's kernels show every live page (Triton's interpreter)",
    "tests/contract/test_states.py": "no wrong state of a layer without attention enters the prefix cache",
    "tests/contract/test_missing_rows.py": "a request that lacks rows ends with an error",
    "tests/serving/test_missing_rows.py": "an engine: whoever lacks pages ends with an error, nobody else",
    "tests/serving/test_families.py::test_family[lfm2 with large states]": "an engine: states in blocks of the pool",
    "tests/serving/test_capacity.py": "page layout, pool and capacity",
    "tests/serving/test_exactness.py": "an engine with model runner V1: exactness",
}


def chimera(version: str) -> Release:
    """The Python of a release with links to the installed engine's compiled code, below `.vllm/`.

    Raises:
        UnavailableError: the release cannot be fetched.
    """
    release, here = fetch(version), installed()
    for library in (here.root / "vllm").rglob("*.so"):
        link = release.root / library.relative_to(here.root)
        if not link.is_symlink():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(library)
    # vLLM takes the platform from the version of its distribution.
    metadata = release.root / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return release


def environment(minor: str) -> dict[str, str]:
    """Variables with which a Python process has a supported release: those of this one where it is installed."""
    if installed().minor == minor:
        return dict(os.environ)
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    search = os.pathsep.join([str(chimera(SUPPORTED[minor]).root), *filter(None, inherited)])
    # What one release compiled or looked up is not for another.
    return {**os.environ, "PYTHONPATH": search, "VLLM_CACHE_ROOT": str(CACHE / "cache" / minor)}


def main() -> int:
    """Run the parts, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_lane", description=__doc__)
    parser.add_argument("minor", choices=SUPPORTED, help="a supported minor release")
    arguments, rest = parser.parse_known_args()
    try:
        variables = environment(arguments.minor)
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    is_chimera = variables.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
    kind = (
        f"Python of {SUPPORTED[arguments.minor]}, compiled code of {installed().version}" if is_chimera else "installed"
    )
    print(f"vLLM {arguments.minor}: {kind}", flush=True)
    # The value of an option (`-n 2`) is no path.
    names_a_path = any(Path(ROOT, each.split("::")[0]).exists() for each in rest)
    command = [str(Path(sysconfig.get_path("scripts"), "python")), "-m", "pytest", *rest]
    command += [] if names_a_path else PARTS
    return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
