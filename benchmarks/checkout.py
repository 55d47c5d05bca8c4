"""The package at another commit, with its kernels built, so that two commits can be timed side by side."""

import io
import subprocess
import sys
import tarfile
from pathlib import Path

#: What the package is built from.
_SOURCES = ("vllm_antkv", "setup.py", "pyproject.toml", "README.md", "LICENSE")


def built_at(commit: str) -> Path:
    """A folder with the package of a commit of this repository: under `build`, kept for the next time.

    Raises:
        SystemExit: there is no such commit, or its kernels do not build; what git or the compiler said stands above.
    """
    try:
        name = _output("git", "rev-parse", "--verify", "--short", f"{commit}^{{commit}}").decode().strip()
        folder, ready = Path("build", "commits", name).absolute(), "ready"
        if not (folder / ready).is_file():
            print(f"Building the kernels of {name}, which takes minutes.", file=sys.stderr)
            with tarfile.open(fileobj=io.BytesIO(_output("git", "archive", name, *_SOURCES))) as archive:
                archive.extractall(folder, filter="data")
            _output(sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", folder=folder)
            (folder / ready).touch()
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{commit} cannot be built: {' '.join(error.cmd)} ended with {error.returncode}.") from None
    return folder


def _output(*command: str, folder: Path | None = None) -> bytes:
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE).stdout
