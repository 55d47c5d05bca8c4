"""What the C++ kernels are built from. setup.py runs this file by itself: it imports nothing of ours."""

import hashlib
from pathlib import Path


def digest(csrc: Path) -> str:
    """Of all sources and headers of `csrc/cpu`, with their names."""
    sha = hashlib.sha256()
    for path in sorted((csrc / "cpu").rglob("*.[ch]*")):
        sha.update(path.relative_to(csrc).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return sha.hexdigest()[:16]
