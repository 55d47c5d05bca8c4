"""The locks of the tools lie beside either engine's lock and move nothing in it."""

import re
from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
TOOLS = ["dev", "browser", "deploy", "loadtest", "tasks", "vision", "wheel"]


def names(file):
    lines = (REQUIREMENTS / file).read_text().splitlines()
    return {re.sub(r"[-_.]+", "-", re.split(r"[=<>!]", line)[0]).lower() for line in lines if line and line[0] != "#"}


def pins(lock):
    lines = (REQUIREMENTS / f"{lock}.lock").read_text().splitlines()
    return dict(line.lower().split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("tool", TOOLS)
def test_the_lock_holds_what_is_asked_for(tool):
    assert names(f"{tool}.in") <= names(f"{tool}.lock")


@pytest.mark.parametrize("engine", ["cpu", "gpu", "dev"])
@pytest.mark.parametrize("tool", TOOLS)
def test_the_lock_moves_nothing_of_the_engines(tool, engine):
    ours, theirs = pins(tool), pins(engine)
    assert {name: ours[name] for name in ours.keys() & theirs} == {name: theirs[name] for name in ours.keys() & theirs}
