"""Sources of any vLLM release: the installed one, or a wheel of the package index, unpacked without its binaries.

They are kept in `.vllm/VERSION/`, which git ignores.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".vllm"
#: What `import vllm` and an engine read of a wheel, beside its compiled code.
_KEPT = (".py", ".json", ".jinja", ".txt")


class UnavailableError(Exception):
    """A release cannot be had, with one sentence that says why."""


@dataclass(frozen=True)
class Release:
    """A release of vLLM as sources.

    version: as `vllm.__version__` says, without a local part.
    root: the folder that contains `vllm/`.
    """

    version: str
    root: Path

    @property
    def minor(self) -> str:
        """`0.33` of 0.33.1."""
        return ".".join(self.version.split(".")[:2])


def installed() -> Release:
    """The vLLM of this environment, or the one that stands first on PYTHONPATH."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise UnavailableError("vLLM is not installed here: run `make venv`.")
    root = Path(spec.origin).parents[1]
    version = importlib.metadata.distribution("vllm").version
    return Release(version.split("+")[0], root)


def newest() -> str:
    """The newest final release on the package index."""
    command = [*_PIP, "install", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", *_WHEELS, "vllm"]
    answer = json.loads(_run(command, "the newest vLLM"))
    return answer["install"][0]["metadata"]["version"]


def fetch(version: str) -> Release:
    """The sources of a release, from the cache, this environment or the package index (330 MB, of which 60 are kept).

    Raises:
        UnavailableError: no network, or no such release.
    """
    folder = CACHE / version
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            command = [*_PIP, "download", "--no-deps", "--no-cache-dir", "--dest", temporary, *_WHEELS]
            _run([*command, f"vllm=={version}"], f"vLLM {version}")
            sources = Path(temporary, "sources")
            with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
                names = [name for name in archive.namelist() if name.startswith("vllm/") and name.endswith(_KEPT)]
                archive.extractall(sources, names)
            try:
                os.replace(sources, folder)
            except OSError:  # another process was quicker
                assert folder.exists()
    return Release(version, folder)


def sources_of(version: str) -> Release:
    """`installed` where that is the version, else `fetch`."""
    here = installed()
    return here if here.version == version else fetch(version)


_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
_WHEELS = ("--only-binary", ":all:")


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise UnavailableError(f"The package index did not give {what} ({said}): check the network and the version.")
    return done.stdout
