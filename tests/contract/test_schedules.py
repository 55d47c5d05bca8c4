"""Both releases' schedulers do the same with antkv pages: under random schedules, every step of them is equal."""

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.vllm_contract.releases import UnavailableError
from scripts.vllm_lane import environment
from vllm_antkv.releases import SUPPORTED

# Two processes of a minute each on a machine of one's own.
pytestmark = pytest.mark.serving

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of every supported release: the lines of `schedule_trace`."""
    folder = tmp_path_factory.mktemp("traces")
    try:
        environments = {minor: environment(minor) for minor in SUPPORTED}
    except UnavailableError as error:
        pytest.skip(str(error))
    running = {minor: _start(folder / minor, variables) for minor, variables in environments.items()}
    for minor, process in running.items():
        said = process.communicate()[0]
        assert process.returncode == 0, f"vLLM {minor}: {said[-2000:]}"
    return {minor: [json.loads(line) for line in (folder / minor).read_text().splitlines()] for minor in SUPPORTED}


def _start(output: Path, variables: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.contract.schedule_trace", str(output)]
    # Hashes of blocks start from the seed.
    variables = {**variables, "PYTHONHASHSEED": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.Popen(
        command, env=variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def test_every_step_is_the_same(traces: dict[str, list[Any]]) -> None:
    (oldest, first), *others = traces.items()
    for minor, lines in others:
        for one, other in zip(first, lines, strict=True):
            assert one == other, f"{oldest} and {minor} differ"


def test_what_is_compared_happens(traces: dict[str, list[Any]]) -> None:
    """Prefix hits, preemptions, chunks of prompts, pages that died, and eviction of published ones."""
    steps = [line for line in next(iter(traces.values())) if line[0] != "pool"]
    assert sum(hit for step in steps for _, hit in step[2]) > 1000
    assert sum(len(step[3]) for step in steps) > 20
    assert sum(max(step[1].values(), default=0) > 100 for step in steps) > 10
    assert any(0 in table[1:] and table[0] != 0 for step in steps for tables in step[4].values() for table in tables)
    published = [set(step[7]) for step in steps]
    assert sum(bool(before - after) for before, after in itertools.pairwise(published)) > 10
