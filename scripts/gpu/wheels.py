"""Wheels for another machine: download exactly the pinned ones, and write them anew with less inside."""

import base64
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

#: glibc of the GPU machine (Ubuntu 24.04); pip compares platform tags literally, so every older one is named too.
_GLIBC_MINOR = 39
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in range(_GLIBC_MINOR, 4, -1)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
)

#: What becomes of a file: its new content, or None where it stays behind.
Change = Callable[[str, bytes], bytes | None]


def download(requirements: Path, python: str, folder: Path) -> list[Path]:
    """The wheels that a requirements file pins by version and hash, for CPython `python` on x86-64 Linux.

    Args:
        requirements: one `name==version --hash=sha256:...` per package; dependencies are not followed.
        python: as `3.12`.
        folder: where wheels are kept; those that are there already are not fetched again.

    Raises:
        subprocess.CalledProcessError: pip could not download a wheel, and has said why.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {
        line.rpartition("sha256:")[2].strip() for line in requirements.read_text().splitlines() if "sha256:" in line
    }
    have = {sha256(path.read_bytes()): path for path in folder.glob("*.whl")}
    if not wanted <= have.keys():
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
        command += [word for abi in (f"cp{python.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
        command += [word for platform in _PLATFORMS for word in ("--platform", platform)]
        command += ["--find-links", str(folder), "--dest", str(folder), "--requirement", str(requirements)]
        subprocess.run(command, check=True)
        have = {sha256(path.read_bytes()): path for path in folder.glob("*.whl")}
    return sorted(have[digest] for digest in wanted)


def repack(wheel: Path, change: Change, folder: Path) -> Path:
    """Write a wheel anew into `folder`, uncompressed (the bundle is compressed as a whole), and return its path.

    Args:
        change: called with the path and the content of every file but RECORD.
    """
    path = folder / wheel.name
    record: list[tuple[str, str, int | str]] = []
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as target:
        for name in _files(source):
            if name.endswith(".dist-info/RECORD"):
                record_name = name
                continue
            content = change(name, source.read(name))
            if content is not None:
                _add(target, name, content)
                digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
                record.append((name, f"sha256={digest}", len(content)))
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([*record, (record_name, "", "")])
        _add(target, record_name, table.getvalue().encode())
    return path


def sha256(content: bytes) -> str:
    """Hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def _files(wheel: zipfile.ZipFile) -> Iterable[str]:
    return (item.filename for item in wheel.infolist() if not item.is_dir())


def _add(target: zipfile.ZipFile, name: str, content: bytes) -> None:
    # A fixed date: the same input gives the same bundle.
    target.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content)
