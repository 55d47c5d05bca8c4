"""The work folder of one calibration: what is finished survives a kill, and is found again by the same command."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from vllm_antkv.errors import CalibrationError
from vllm_antkv.whole_file import write_whole

_WINDOWS_DONE = "windows.json"


class Workspace:
    """A folder `.work-<hash of all settings>` beside the codebooks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def windows_done(self) -> int:
        """Windows whose activations are completely captured."""
        path = self.folder / _WINDOWS_DONE
        return int(json.loads(path.read_text())) if path.exists() else 0

    def set_windows_done(self, count: int) -> None:
        """Record that the first `count` windows are captured."""
        write_whole(self.folder / _WINDOWS_DONE, json.dumps(count).encode())

    def load_layer(self, preset: str, layer: int) -> np.ndarray | None:
        """The centroids of a finished layer, or None."""
        path = self._layer_path(preset, layer)
        return np.load(path, allow_pickle=False) if path.exists() else None

    def save_layer(self, preset: str, layer: int, centroids: np.ndarray) -> None:
        """Keep the centroids of a layer, completely or not at all."""
        path = self._layer_path(preset, layer)
        with open(path.with_suffix(".part"), "wb") as file:
            np.save(file, centroids, allow_pickle=False)
        os.replace(file.name, path)

    def remove(self) -> None:
        """Delete the folder."""
        # First what vouches for the files: a kill in between must not leave a word without them.
        (self.folder / _WINDOWS_DONE).unlink(missing_ok=True)
        shutil.rmtree(self.folder)

    def _layer_path(self, preset: str, layer: int) -> Path:
        return self.folder / f"{preset}-{layer:03d}.npy"


@contextmanager
def open_workspace(out: Path, settings: Mapping[str, Any]) -> Iterator[Workspace]:
    """The work folder for these settings, made if it does not exist, locked against a second process.

    Raises:
        CalibrationError: `out` cannot be written, or another process is at the same work.
    """
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    folder = out / f".work-{name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = FileLock(folder / "lock").acquire(blocking=False)
    except Timeout:
        raise CalibrationError(
            f"The same calibration is already running in {folder}: wait for it, or end it."
        ) from None
    except OSError as error:
        raise CalibrationError(f"{out} cannot be written: {error.strerror}.") from None
    with held:
        yield Workspace(folder)


def check_writable(out: Path) -> None:
    """CalibrationError when no file can be made in `out`, before any work is done."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise CalibrationError(f"{out} cannot be written: {error.strerror}.") from None
