"""The versions of Triton that the kernels are tested with: what `.venv` holds, and the oldest that is supported."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import ROOT


@dataclass(frozen=True)
class Triton:
    """A version for processes of their own.

    folder: where it is installed beside the environment's; None is the environment's own.
    """

    name: str
    folder: Path | None = None

    def __str__(self) -> str:
        return self.name

    def environment(self) -> dict[str, str]:
        """Variables of a process that is to import it. Skips the test where it is not installed."""
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        if self.folder is None:
            return variables
        if not (self.folder / "triton").is_dir():
            pytest.skip(f"Triton {self.name} is not in {self.folder}: `make venv` puts it there")
        return variables | {"PYTHONPATH": str(self.folder)}


NEWEST = Triton("newest")
#: Of machines with PyTorch 2.11, as in docs/gpu-check.md.
OLDEST = Triton("3.6.0", ROOT / ".venv" / "triton-3.6")
