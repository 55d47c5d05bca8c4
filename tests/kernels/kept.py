"""What tests compile, kept for the next run."""

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_KEPT = Path(__file__).parents[2] / ".pytest_cache"


def kept(kind: str, of: bytes, build: Callable[[Path], None], suffix: str = "") -> Path:
    """What `build` puts into a folder as "made": under the hash of all that it is made of, in a folder for its kind.

    Several processes may do so at once.
    """
    path = _KEPT / kind / f"{hashlib.sha256(of).hexdigest()}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            build(Path(folder))
            os.replace(f"{folder}/made", path)
    return path
