"""What a check answers with."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    what: the thing looked at. detail: what was found. remedy: what to do about it, empty when nothing.
    """

    what: str
    state: State
    detail: str
    remedy: str = ""
