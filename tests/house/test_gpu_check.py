"""The GPU check without a GPU: what is run, what is left after a cut, and what the tables say."""

import ast
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_decode, gpu_end_to_end
from benchmarks.gpu import records, tables
from benchmarks.gpu.report import markdown
from benchmarks.gpu.steps import RESULT, STEPS, Step, chosen
from benchmarks.gpu.timing import Timing, attempt, failed
from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
MACHINE = {"gpu": "NVIDIA Y", "memory_gib": 80.0, "driver": "1.2", "versions": {"torch": "2.11"}}
OK = Step("one", ("-c", "print('fine')"), 1, PATIENCE)
BROKEN = Step("two", ("-c", "raise SystemExit('this is why')"), 1, PATIENCE)
#: Python begins in a hundredth of a second where it looks for nothing: within their limit on any machine.
AT_ONCE = "-ISc"
SLOW = Step("three", (AT_ONCE, "import time; print('begun', flush=True); time.sleep(3600)"), 1, 10)
REPORT = {"machine": MACHINE, "rows": []}
CUT = "; time.sleep(3600)"
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
            if word.startswith("benchmarks."):
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
    assert len(chosen(["capacity"])) == 3
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


def test_the_log_holds_what_every_step_printed(check, tmp_path):
    check(BROKEN, OK)
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["== two", "this is why", "== one", "fine"]


def test_what_a_step_had_measured_before_it_was_ended_is_kept(check):
    code = WRITE.replace("import json", "import json, time") + CUT
    _, found = check(Step("four words", (AT_ONCE, code), 1, 10))
    assert found["four words"].status == "timeout"
    assert found["four words"].result == REPORT


def test_a_step_has_its_own_variables(check):
    _, found = check(Step("five", ("-c", "import os; print(os.environ['NEW'])"), 1, PATIENCE, {"NEW": "here"}))
    assert found["five"].output == "here\n"


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


def test_results_that_are_none_are_refused(tmp_path):
    (tmp_path / "results.json").write_text("[1]")
    with pytest.raises(ValueError, match="move it away"):
        records.Records(tmp_path / "results.json")


def test_the_digest_follows_the_sources(tmp_path):
    (tmp_path / "benchmarks").mkdir()
    source = tmp_path / "benchmarks" / "a.py"
    source.write_text("1")
    before = records.source_digest(tmp_path)
    (tmp_path / "benchmarks" / "notes.md").write_text("no code")
    assert records.source_digest(tmp_path) == before
    source.write_text("2")
    assert records.source_digest(tmp_path) != before


def test_a_timing_is_the_median_and_the_distance_between_the_quartiles():
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    assert (timing.median_ms, timing.spread_ms) == (4.0, 4.0)
    moved = timing.moving(num_bytes=4e9, bandwidth=2e12)
    # 4 GB in 4 ms are 1 TB/s.
    assert moved["roofline"] == pytest.approx(0.5)


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


def test_large_caches_are_left_out():
    pairs = gpu_decode.settings([1024, 131072], [1, 256])
    assert pairs == [(1024, 1), (1024, 256), (131072, 1)]


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


def decode_report():
    def side(median):
        return {"median_ms": median, "spread_ms": 0.002, "bytes": 2e6, "roofline": 0.5}

    sides = {"FA3": side(0.1), "ours": side(0.05), "theirs": {"error": "RuntimeError: a | b\nmore"}}
    return {
        "machine": MACHINE,
        "baseline": "FA3",
        "bandwidth": 3e12,
        "rows": [{"context": 1024, "batch": 8, "sides": sides}],
    }


def test_decode_table():
    lines = tables.decode_table(decode_report()).splitlines()
    assert lines[0] == "Memory copies at 3.00 TB/s."
    assert lines[5] == "| ours | 1,024 | 8 | 0.0500 ± 0.0010 | 2.00 | 2.0 | 50% |"
    assert lines[6] == "| theirs | 1,024 | 8 | RuntimeError: a \\| b |  |  |  |"


def test_prefill_table_adds_up_what_attention_needs():
    def timing(median):
        return {"median_ms": median, "spread_ms": 0.0}

    timings = {"FA3": timing(2.0), "encode_store": timing(0.1), "anchor_score": timing(0.2), "attend": timing(2.0)}
    timings["attend, Triton"] = timing(4.0)
    table = tables.prefill_table({"baseline": "FA3", "rows": [{"tokens": 8192, "timings": timings}]})
    assert table.splitlines()[-1].endswith("| 1.10 | 0.05 |")
    timings["attend"] = {"error": "RuntimeError: why"}
    line = tables.prefill_table({"baseline": "FA3", "rows": [{"tokens": 8192, "timings": timings}]}).splitlines()[-1]
    assert line.endswith("| RuntimeError: why | 4.0000 ± 0.0000 |  | 0.05 |")


def test_encode_store_table_names_a_kernel_that_could_not_run():
    sides = {"triton": {"median_ms": 0.5, "spread_ms": 0.0, "roofline": 0.25}, "cuda": {"error": "ImportError: cupy"}}
    line = tables.encode_store_table({"rows": [{"tokens": 64, "sides": sides}]}).splitlines()[-1]
    assert line == "| 64 | 0.5000 ± 0.0000 | ImportError: cupy | 25% |  |"


def test_an_attempt_gives_what_was_measured_or_why_not():
    good = attempt(lambda: {"median_ms": 1.0})
    bad = attempt(lambda: {"median_ms": 1 / 0})
    assert (good, bad) == ({"median_ms": 1.0}, {"error": "ZeroDivisionError: division by zero"})
    assert failed({"ours": good, "theirs": bad})
    assert not failed({"ours": good})


def record(step, result, status="passed", output="noise\nthe end"):
    fields = {"seconds": 1.0, "started": "now", "commit": "abc", "source": "f00"}
    return records.Record(step=step, status=status, output=output, result=result, **fields)


def test_results_of_single_sides_make_one_table_with_ratios():
    def one(side, tokens):
        rows = [{"side": side, "tokens": tokens}]
        return record(f"capacity {side}", {"machine": MACHINE, "max_len": 1, "gpu_bytes": 1, "rows": rows})

    kept = [record("kernels", None, "failed"), one("auto", 1000), one("antkv-1bit", 12500)]
    text = markdown(kept)
    assert text.count("NVIDIA Y") == 1
    assert "| kernels | failed | 1 | abc | the end |" in text
    assert "| antkv-1bit | 12,500 | 12.50 |" in text
    assert "Decode attention" not in text
