"""The GPU check without a GPU: what is run, what is left after a cut, and what the tables say."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import tables
from tests.patience import PATIENCE, wait_for
from tests.places import ROOT

MAKE = ("make", "--keep-going", "--file", "benchmarks/gpu.mk")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stops_with_one_sentence():
    run = subprocess.run(["make", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode
    assert run.stderr.startswith("No CUDA device was found")
    assert not run.stdout


def test_every_step_runs_something_that_exists_and_every_test_for_gpus_is_in_one(tmp_path):
    commands = subprocess.check_output([*MAKE, "--dry-run", f"OUT={tmp_path}"], cwd=ROOT, text=True)
    for module in re.findall(r"-m ((?:benchmarks|scripts)\.\w+)", commands):
        assert importlib.util.find_spec(module)
    tests = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert set(re.findall(r"tests/gpu/\S+\.py", commands)) == tests
    assert len(re.findall(r"timeout \S+ \d+ (?:compute-sanitizer .*)?python -[cm] ", commands)) == commands.count("== ")


@pytest.fixture
def check(tmp_path):
    """Starts two steps, `graphs` and `serve`, with a program in Python's place that does what a line of bash says."""

    def start(line):
        program = tmp_path / "python"
        program.write_text(f"#!/bin/bash\necho $0\n{line}\n")
        program.chmod(0o755)
        options = [f"PYTHON={program}", f"OUT={tmp_path}", "graphs", "serve"]
        return subprocess.Popen([*MAKE, *options], cwd=ROOT, stdout=subprocess.PIPE, text=True)

    return start


def test_a_step_that_fails_is_recorded_and_the_next_one_runs(check, tmp_path):
    run = check('[[ "$*" = *scripts.demo* ]] || { echo this is why; exit 1; }')
    assert "this is why" in run.communicate()[0]
    assert run.returncode
    assert "this is why" in (tmp_path / "graphs.failed.txt").read_text()
    assert (tmp_path / "serve.txt").exists()


def test_a_second_run_goes_on_where_the_first_one_was_cut_off(check, tmp_path):
    check('[[ "$*" = *scripts.demo* ]]').wait()
    before = (tmp_path / "serve.txt").stat().st_mtime_ns
    run = check("")
    assert "== serve" not in run.communicate()[0]
    assert run.returncode == 0
    assert (tmp_path / "serve.txt").stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {"python", "graphs.txt", "serve.txt"}


def test_cutting_the_check_off_ends_the_step_that_runs(check, tmp_path):
    """It would hold the GPU."""
    run = check("echo $$; sleep 3600")
    log = tmp_path / "graphs.failed.txt"
    wait_for(lambda: log.exists() and log.read_text().count("\n") == 2)
    run.terminate()
    run.wait(PATIENCE)
    wait_for(lambda: not Path(f"/proc/{log.read_text().split()[1]}").exists())


#: Functions of vLLM that cannot be imported without a GPU, and where they are.
CALLED = {
    "flash_attn_varlen_func": ("flash_attention", "vllm_flash_attn/flash_attn_interface.py"),
    "get_scheduler_metadata": ("flash_attention", "vllm_flash_attn/flash_attn_interface.py"),
    "triton_turboquant_store": ("turboquant", "v1/attention/ops/triton_turboquant_store.py"),
    "triton_turboquant_decode_attention": ("turboquant", "v1/attention/ops/triton_turboquant_decode.py"),
}


@pytest.mark.parametrize("name", CALLED)
def test_kernels_of_vllm_are_called_with_arguments_that_they_have(name):
    ours, theirs = CALLED[name]
    vllm = Path(importlib.util.find_spec("vllm").origin).parent
    tree = ast.parse((vllm / theirs).read_text())
    (function,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    parameters = [parameter.arg for parameter in function.args.args]
    required = parameters[: len(parameters) - len(function.args.defaults)]
    tree = ast.parse((ROOT / "benchmarks" / "gpu" / f"{ours}.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name]
    assert calls
    for call in calls:
        # `*rows` are K and V.
        positional = sum(2 if isinstance(argument, ast.Starred) else 1 for argument in call.args)
        given = [*parameters[:positional], *(keyword.arg for keyword in call.keywords)]
        assert len(given) == len(set(given))
        assert set(required) <= set(given) <= set(parameters)


@pytest.mark.long
@pytest.mark.release
def test_engines_are_measured_on_a_cpu_too(tmp_path):
    report = tmp_path / "engines.json"
    sides = ["auto", "antkv-1bit", "no-such-cache"]
    command = [sys.executable, "-m", "benchmarks.gpu_engines", "--model", "models/embedded", "--sides", *sides]
    command += ["--contexts", "512", "--kv-gib", "0.01", "--json", str(report)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stderr[-2000:]
    auto, ours, unknown = json.loads(report.read_text())["rows"]
    assert auto.keys() == ours.keys()
    assert ours["largest"]["capacity"] > auto["largest"]["capacity"]
    assert "self CPU" in ours["profile"]["mixed"].replace("Self", "self")
    assert unknown["error"].startswith("start_seconds: ")


def test_engines_stand_beside_auto():
    """One that failed says where."""
    largest = {"capacity": 20480, "batch": 20, "tokens_per_second": 254.4}
    auto = {"side": "auto", "first_token_1024": 0.05, "largest": largest}
    broken = {"side": "fp8", "error": "first_token_1024: RuntimeError: a | b\nmore"}
    ours = {"side": "antkv-1bit", "first_token_1024": 0.055, "profile": {"prompt": "long"}}
    text = tables.engines_table({"kv_gib": 8, "output": 64, "rows": [auto, broken, ours]})
    assert "| first_token_1024 | 0.05, 1.00 |  | 0.055, 1.10 |" in text
    assert "| largest | 20,480 tokens, 20 requests: 254 tokens/s |  |  |" in text
    assert text.endswith("| error |  | first_token_1024: RuntimeError: a \\| b |  |")


def test_results_make_tables():
    """A kernel that could not run says why."""

    def side(median):
        return {"median_ms": median, "spread_ms": 0.002, "bytes": 2e6, "roofline": 0.5}

    broken = {"error": "RuntimeError: a | b\nmore"}
    sides = {"FA3": side(0.1), "ours": side(0.05), "theirs": broken}
    row = {"context": 1024, "batch": 8, "sides": sides}
    text = tables.decode_table({"baseline": "FA3", "bandwidth": 3e12, "rows": [row]})
    assert text.startswith("Memory copies at 3.00 TB/s.\n")
    assert "| ours | 1,024 | 8 | 0.0500 ± 0.0010 | 2.00 | 2.0 | 50% |\n" in text
    assert text.endswith("| theirs | 1,024 | 8 | RuntimeError: a \\| b |  |  |  |")
    timings = {"FA3": side(2.0), "encode_store, CUDA": broken, "encode_store": side(0.1), "anchor_score": side(0.2)}
    timings |= {"attend": side(2.0), "attend, Triton": side(4.0)}
    text = tables.prefill_table({"baseline": "FA3", "rows": [{"tokens": 8192, "past": 0, "timings": timings}]})
    assert text.endswith(" | 0.2000 ± 0.0010 | 2.0000 ± 0.0010 | 4.0000 ± 0.0010 | 1.10 | 0.05 |")
