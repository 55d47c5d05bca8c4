"""Errors a caller may want to catch. Each message is one sentence that says what is wrong and what to do."""

import reprlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_REASON = 200


class AntKVError(Exception):
    """Base of everything vllm-antkv raises on purpose."""


class SettingsError(AntKVError, ValueError):
    """A flag or a setting has a value that cannot be used."""


class CodebookError(AntKVError):
    """A codebook file is missing, damaged, or does not belong to this model and preset."""


class UnsupportedModelError(AntKVError):
    """The model, or the way it is to be served, cannot be combined with an antkv cache."""


class CalibrationError(AntKVError):
    """Centroids cannot be learned from what was given."""


def first_problem(error: "ValidationError", whole: str) -> tuple[str, str]:
    """The field that pydantic minds first (or `whole`, when it is all of them), quoted, and what it minds.

    Both are printable and short whatever was given: names and values may come from a file or a client.
    """
    first = error.errors()[0]
    field = reprlib.repr(".".join(map(str, first["loc"])) or whole)
    reason = first["msg"].removeprefix("Value error, ")
    return field, f"{reason}, got {reprlib.repr(first['input'])}"


def reason(problem: BaseException) -> str:
    """The gist of an exception of a library below us, which may explain at length: its first line, cut and undotted."""
    lines = [line.strip() for line in str(problem).strip().splitlines()]
    if not lines or isinstance(problem, LookupError):
        # A KeyError says no more than the key.
        lines = [f"{type(problem).__name__} {' '.join(lines)}"]
    gist = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return gist[:_MAX_REASON].rstrip(" .,:")
