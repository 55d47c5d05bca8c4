"""One engine over two machines, by vLLM's `--nnodes`: here two processes with folders of their own."""

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.server import Start, free_port, running
from tests.patience import PATIENCE, wait_for
from tests.serving.conftest import EMBEDDED
from tests.serving.server import MODEL_NAME, PRESET, answer, vllm_environment

pytestmark = pytest.mark.long


@contextmanager
def machines(folder: Path, kind: str, *settings: dict[str, Any]) -> Iterator[list[Start]]:
    """Two that share the ranks of one engine, "tensor" or "pipeline"; settings: of each."""
    master, port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(EMBEDDED), "--served-model-name", MODEL_NAME]
    command += ["--kv-cache-dtype", PRESET, "--dtype", "float32", "--max-model-len", "1024"]
    # VLLM's stages do not start with it on CPUs.
    command += ["--enforce-eager"] if kind == "tensor" else []
    command += [f"--{kind}-parallel-size=2", "--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={master}"]

    @contextmanager
    def machine(rank: int, *arguments: str) -> Iterator[Start]:
        own, log = json.dumps({"antkv": settings[rank]}), folder / f"{rank}.log"
        with running(
            [*command, f"--node-rank={rank}", "--additional-config", own, *arguments], log, vllm_environment()
        ) as process:
            yield Start(PRESET, f"http://127.0.0.1:{port}", log, process, time.monotonic() + PATIENCE)

    with machine(0, f"--port={port}") as first, machine(1, "--headless") as second:
        yield [first, second]


@pytest.fixture
def another(codebooks, tmp_path) -> str:
    """A folder with the same codebook but for a threshold."""
    from vllm_antkv.codebook import Codebook, codebook_path

    codebook = Codebook.load(codebook_path(Path(codebooks), PRESET))
    sinks = codebook.header.sinks
    header = codebook.header.model_copy(update={"sinks": sinks.model_copy(update={"threshold": 2 * sinks.threshold})})
    replace(codebook, header=header).save(codebook_path(tmp_path / "other", PRESET))
    return str(tmp_path / "other")


@pytest.mark.parametrize("kind", ["tensor", pytest.param("pipeline", marks=pytest.mark.release)])
def test_ranks_that_differ_do_not_start(default, another, tmp_path, kind):
    theirs, differing = {
        "tensor": ({"codebooks": another}, r"codebook \(\w+, \w+\)"),
        "pipeline": ({"anchor_share": 0.03, "prefix": 0}, r"anchor_share \(0.015, 0.03\) and prefix \(0, 8\)"),
    }[kind]
    with machines(tmp_path, kind, default, {**default, **theirs}) as starts:
        for start in starts:
            assert start.process.wait(PATIENCE) != 0
            assert re.search(f"SettingsError: The server and its ranks differ in {differing}: ", start.log.read_text())


def test_two_machines_answer_as_one(start_engine, default, prompts, tmp_path):
    with start_engine(EMBEDDED, PRESET, default) as engine:
        alone = [list(completion.tokens) for completion in engine.complete(prompts[-2:])]
    with machines(tmp_path, "tensor", default, default) as (first, _):
        wait_for(first.is_healthy)
        assert [answer(first.url, prompt) for prompt in prompts[-2:]] == alone
