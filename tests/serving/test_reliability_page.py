"""docs/reliability.md says how many bad inputs the tables hold."""

import re
from pathlib import Path

import pytest

from tests.serving import bad_requests, test_bad_starts, test_refusals
from tests.unit import test_bad_arguments, test_bad_codebooks, test_bad_settings
from tests.unit.damaged import DAMAGES

pytestmark = pytest.mark.serving

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
REQUESTS = (bad_requests.COMPLETION_FIELDS, bad_requests.CHAT_FIELDS, bad_requests.RAW, bad_requests.WIRE)
STARTS = (
    test_bad_starts.USAGE,
    test_bad_starts.NO_DTYPES,
    test_bad_starts.OURS,
    test_bad_starts.VLLMS,
    test_bad_starts.CODEBOOKS,
)
REFUSALS = (test_refusals.MODELS, test_refusals.OPTIONS)

COUNTS = {
    "codebook files": len(test_bad_codebooks.TABLE),
    "settings": len(test_bad_settings.TABLE),
    "command lines of `antkv`": len(test_bad_arguments.TABLE),
    "command lines of `vllm serve`": sum(map(len, STARTS)),
    "models and options that are refused": sum(map(len, REFUSALS)),
    "damaged models": len(DAMAGES),
    "HTTP requests": sum(map(len, REQUESTS)),
}


def test_the_page_has_the_sizes_of_the_tables() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    assert {name: int(count) for name, count in rows} == {**COUNTS, "together": sum(COUNTS.values())}


def test_there_are_enough() -> None:
    assert sum(COUNTS.values()) >= 200
