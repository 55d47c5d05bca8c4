"""The results of the GPU check: one JSON file, written anew after every step, so that a run can be cut off anywhere."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import ROOT
from vllm_antkv.evaluate.report import write_json

#: What a result depends on.
_SOURCES = ("vllm_antkv", "benchmarks", "tests/gpu", "tests/kernels")
_SUFFIXES = (".py", ".cu", ".cuh")
#: Characters of a failed step's output that are kept.
_TAIL = 6000


@dataclass(frozen=True)
class Record:
    """What came of a step.

    status: `passed`, `failed` or `timeout`.
    source: of the files that it ran (`source_digest`).
    output: the end of what it printed.
    result: its JSON, where it writes one.
    """

    step: str
    status: str
    seconds: float
    started: str
    commit: str | None
    source: str
    output: str
    result: dict[str, Any] | None

    @classmethod
    def of(cls, output: str, **fields: Any) -> "Record":
        """With the end of the output alone."""
        return cls(output=output[-_TAIL:], **fields)


class Records:
    """Records by step, in a file that is read at the start and written after every step.

    Raises:
        ValueError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._records: dict[str, Record] = {}
        if path.exists():
            try:
                self._records = {name: Record(**fields) for name, fields in json.loads(path.read_text()).items()}
            except (ValueError, TypeError, AttributeError):
                raise ValueError(f"{path} does not hold results of the GPU check: move it away.") from None

    def __iter__(self) -> Any:
        return iter(self._records.values())

    def is_done(self, step: str, source: str) -> bool:
        """There is a record of this step, whatever came of it, and the sources are still the same."""
        return step in self._records and self._records[step].source == source

    def add(self, record: Record) -> None:
        """Keep a record, in place of an older one of the same step."""
        self._records[record.step] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {name: asdict(kept) for name, kept in self._records.items()})


def source_digest(root: Path = ROOT) -> str:
    """Of the files whose change makes earlier results those of other code; 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
