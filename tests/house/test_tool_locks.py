"""The locks of the tools for loadtest/ and docker/ lie beside either engine's lock and move nothing in it."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
TOOLS = ["deploy", "loadtest"]


def names(file):
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return {re.sub(r"[-_.]+", "-", re.split(r"[=<>!]", line)[0]).lower() for line in lines if line and line[0] != "#"}


@pytest.mark.parametrize("tool", TOOLS)
def test_the_lock_holds_what_is_asked_for(tool):
    assert names(f"{tool}.in") <= names(f"{tool}.lock")


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_lock_holds_nothing_of_the_engines(tool, engine):
    assert not names(f"{tool}.lock") & names(f"{engine}.lock")
