"""The GPU check without a GPU: what is run, what is left after a cut, and what the tables say."""

import ast
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_decode, gpu_end_to_end
from benchmarks.gpu import records, tables
from benchmarks.gpu.report import markdown
from benchmarks.gpu.steps import RESULT, STEPS, Step, chosen
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "NVIDIA Y", "memory_gib": 80.0, "driver": "1.2", "versions": {"torch": "2.11"}}
OK = Step("one", ("-c", "print('fine')"), 1, PATIENCE)
BROKEN = Step("two", ("-c", "raise SystemExit('this is why')"), 1, PATIENCE)
#: Python begins in a hundredth of a second where it looks for nothing: within the limit on any machine.
SLOW = Step("three", ("-ISc", "import time; print('begun', flush=True); time.sleep(3600)"), 1, 10)
REPORT = {"machine": MACHINE, "rows": []}
WRITE = f"import json; print(json.dumps({REPORT}), file=open('{RESULT}', 'w'))"
WRITES = Step("four words", ("-c", WRITE), 1, PATIENCE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stops_with_one_sentence():
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.startswith("No CUDA device was found")
    assert len(run.stderr.splitlines()) == 1


def test_every_step_names_something_that_exists():
    for step in STEPS:
        for word in step.command:
            if word.startswith(("benchmarks.", "scripts.")):
                importlib.import_module(word)
            elif word.endswith(".py"):
                assert (ROOT / word).is_file()
        assert step.expected_s < step.limit_s < 9.5 * 60
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_every_test_for_gpus_is_in_a_step():
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {word for step in STEPS for word in step.command if word.startswith("tests/gpu/")}


def test_steps_are_chosen_by_name_or_first_word():
    assert [step.name for step in chosen(["end-to-end auto", "decode 1024"])] == ["decode 1024", "end-to-end auto"]
    assert [step.name for step in chosen(["decode"])] == [f"decode {context}" for context in gpu_decode.CONTEXTS]
    with pytest.raises(ValueError, match="environment"):
        chosen(["nonsense"])


@pytest.fixture
def check(monkeypatch, tmp_path):
    """Runs the check on steps of this file, as if there were a GPU; returns its exit status and its records."""

    def run(*steps, arguments=()):
        monkeypatch.setattr(gpu_check, "chosen", lambda only: steps)
        monkeypatch.setattr(gpu_check, "require_gpu", lambda: None)
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), *arguments])
        status = gpu_check.main()
        return status, {record.step: record for record in records.Records(tmp_path / "results.json")}

    return run


def test_a_step_that_fails_is_recorded_and_the_next_one_runs(check):
    status, found = check(BROKEN, SLOW, WRITES, OK)
    assert status == 1
    assert {name: record.status for name, record in found.items()} == {
        "two": "failed",
        "three": "timeout",
        "four words": "passed",
        "one": "passed",
    }
    assert "this is why" in found["two"].output
    assert found["three"].output.strip() == "begun"
    assert found["four words"].result == REPORT


def test_a_second_run_goes_on_where_the_first_one_was_cut_off(check):
    _, before = check(OK)
    status, after = check(OK, WRITES)
    assert status == 0
    assert after["one"] == before["one"]
    assert after["four words"].status == "passed"


def test_finished_steps_run_again_when_asked_or_when_the_sources_have_changed(check, monkeypatch):
    stamp = Step("stamp", ("-c", "import time; print(time.time_ns())"), 1, PATIENCE)
    stamps = [check(stamp)[1]["stamp"].output, check(stamp, arguments=["--again"])[1]["stamp"].output]
    monkeypatch.setattr(gpu_check, "source_digest", lambda: "changed")
    stamps.append(check(stamp)[1]["stamp"].output)
    assert len(set(stamps)) == 3


def test_what_does_not_fit_into_the_minutes_is_left_for_what_does(check, capsys):
    long = Step("long", ("-c", "print('never')"), 120, 200)
    status, found = check(long, OK, arguments=["--minutes", "1"])
    assert status == gpu_check.UNFINISHED
    assert list(found) == ["one"]
    assert "Still to be run: long." in capsys.readouterr().out


def test_a_step_that_the_end_of_the_minutes_cut_off_has_no_result(check):
    slow = Step("slow", SLOW.command, 1, PATIENCE)
    status, found = check(slow, OK, arguments=["--minutes", "0.05"])
    assert status == gpu_check.UNFINISHED
    assert not found


def test_cutting_the_check_off_ends_the_step_that_runs(tmp_path):
    """It would hold the GPU."""
    code = f"""
import runpy, sys
from benchmarks.gpu import device, steps
device.require_gpu = lambda: None
code = "import os, time; print(os.getpid(), flush=True); time.sleep(3600)"
steps.STEPS = (steps.Step("slow", ("-c", code), 1, 3600),)
sys.argv = ["gpu_check", "--out", {str(tmp_path)!r}]
runpy.run_module("benchmarks.gpu_check", run_name="__main__")
"""
    check = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    log, deadline = tmp_path / "log.txt", time.monotonic() + PATIENCE
    while not (log.exists() and len(lines := log.read_text().split("\n")) > 2):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    check.terminate()
    assert check.wait(PATIENCE) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines[1]), 0)


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


def test_speed_is_that_of_decoding_alone():
    result = {"capacity": 20480, "batch": 20, "prefill_seconds": 2.0, "seconds": 12.0, "start_seconds": 30.0}
    row = gpu_end_to_end.summary(
        "auto", [result, result | {"seconds": 22.0}, result | {"seconds": 7.0}], lambda side, batch: 15.875 * batch
    )
    assert row["tokens_per_second"] == pytest.approx(20 * 127 / 10)
    assert row["spread"] == pytest.approx(20 * 127 * (1 / 5 - 1 / 20))
    assert row["seconds"] == 12.0
    line = tables.end_to_end_table({"kv_gib": 8, "prompt": 896, "output": 128, "rows": [row]}).splitlines()[-1]
    assert line == "| auto | 20,480 | 20 | 254 ± 190 | 1.00 | 80% | 2.0 | 30 |"


def record(step, row, **more):
    result = {"machine": MACHINE, "baseline": "FA3", "bandwidth": 3e12, "rows": [row], **more}
    fields = {"seconds": 1.0, "started": "now", "commit": "abc", "source": "f00", "output": "noise\nthe end"}
    return records.Record(step=step, status="passed", result=result, **fields)


def test_results_make_tables():
    """What was measured of one step in several processes makes one; a kernel that could not run says why."""

    def side(median):
        return {"median_ms": median, "spread_ms": 0.002, "bytes": 2e6, "roofline": 0.5}

    broken = {"error": "RuntimeError: a | b\nmore"}
    timings = {"FA3": side(2.0), "encode_store": side(0.1), "anchor_score": side(0.2), "attend": side(2.0)}
    sides = {"FA3": side(0.1), "ours": side(0.05), "theirs": broken}
    kept = [
        record("decode 1024", {"context": 1024, "batch": 8, "sides": sides}),
        record("decode 8192", {"context": 8192, "batch": 1, "sides": sides}),
        record("prefill", {"tokens": 8192, "timings": timings | {"attend, Triton": side(4.0)}}),
        record("encode-store", {"tokens": 64, "sides": {"triton": side(0.5), "cuda": broken}}),
    ]
    text = markdown([*kept, replace(kept[0], step="kernels", status="failed", result=None)])
    assert text.count("NVIDIA Y") == 1
    for line in (
        "| kernels | failed | 1 | abc | the end |",
        "Memory copies at 3.00 TB/s.",
        "| ours | 1,024 | 8 | 0.0500 ± 0.0010 | 2.00 | 2.0 | 50% |",
        "| theirs | 8,192 | 1 | RuntimeError: a \\| b |  |  |  |",
        " | 0.2000 ± 0.0010 | 2.0000 ± 0.0010 | 4.0000 ± 0.0010 | 1.10 | 0.05 |",
        "| 64 | 0.5000 ± 0.0010 | RuntimeError: a \\| b | 50% |  |",
    ):
        assert f"{line}\n" in text
