"""The command line: exit codes, one-line errors, the JSON that scripts read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.processes import run_python
from vllm_antkv import __version__, cli
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.cli.options import CacheOptions, KeptOptions
from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.report import PerplexityReport, gap_closed, write_json

RESULT_FIELDS = "model method text context windows tokens perplexity nll nominal_bits effective_bits settings versions"


def check_result(content: dict[str, Any]) -> None:
    """As documented: these fields and no others, of the report's types."""
    assert sorted(content) == sorted(RESULT_FIELDS.split())
    report = PerplexityReport.model_validate(content, strict=True)
    assert report.versions.keys() >= {"vllm-antkv", "python", "torch", "transformers"}
    assert min(report.windows, report.tokens, report.perplexity) >= 1
    assert min(report.nll, report.nominal_bits, report.effective_bits) > 0


@pytest.fixture
def perplexity_args(model_folder, codebook_folder, text_file, tmp_path) -> dict[str, Any]:
    return {
        "--method": "antkv-1bit",
        "--codebooks": codebook_folder,
        "--text": text_file,
        "--context": 150,
        "--max-windows": 2,
        "--json": tmp_path / "out.json",
    }


def flat(model: object, args: dict[str, Any]) -> list[str]:
    return [str(model), *(str(part) for pair in args.items() for part in pair)]


# --- what succeeds ---------------------------------------------------------------------------------------------------


def test_perplexity_writes_the_documented_json(model_folder, perplexity_args, capsys):
    more = {"--anchors": 0.05, "--sinks": 0, "--prefix": 2, "--recency": "log:4"}
    assert cli.run(["eval", "perplexity", *flat(model_folder, {**perplexity_args, **more})]) == 0
    content = json.loads(perplexity_args["--json"].read_text())
    check_result(content)
    assert (content["windows"], content["context"], content["tokens"]) == (2, 150, 298)
    assert content["nominal_bits"] == 1
    expected = {"anchor_share": 0.05, "sinks": False, "prefix": 2, "recency": "log:4"}
    assert expected.items() <= content["settings"].items()
    assert f"{content['perplexity']:.4f}" in capsys.readouterr().out
    assert os.listdir(perplexity_args["--json"].parent) == ["out.json"], "no temporary file is left"


def test_compare_holds_every_result_and_the_gap(model_folder, perplexity_args, capsys):
    del perplexity_args["--method"]
    args = flat(model_folder, {**perplexity_args, "--methods": "fp16, cq-1bit,antkv-1bit", "--recency": "sliding:16"})
    assert cli.run(["eval", "compare", *args]) == 0
    content = json.loads(perplexity_args["--json"].read_text())
    assert set(content) == {"results", "gap_closed", "fidelity"}
    assert content["fidelity"].keys() == {"fp16", "cq-1bit", "antkv-1bit"}
    same = {"kl": 0, "top1_agreement": 1}
    bands = [{"first": first, **same, "loss": 0} for first in (0, 128)]
    assert content["fidelity"]["fp16"] == {**same, "by_position": bands}
    assert [result["method"] for result in content["results"]] == ["fp16", "cq-1bit", "antkv-1bit"]
    for result in content["results"]:
        check_result(result)
    assert all(result["settings"]["recency"] == "sliding:16" for result in content["results"][1:])
    assert content["gap_closed"] == gap_closed([PerplexityReport.model_validate(r) for r in content["results"]])
    shown = capsys.readouterr().out
    assert f"{content['gap_closed']['antkv-1bit']:.1%}" in shown
    assert f"{content['fidelity']['cq-1bit']['kl']:.5f}" in shown


def test_a_comparison_that_ends_early_leaves_what_it_measured(model_folder, perplexity_args, capsys, monkeypatch):
    def on_a_full_disk(path: Path, content: dict[str, Any]) -> None:
        if len(content["results"]) > 1:
            raise OSError("No space left on device")
        write_json(path, content)

    monkeypatch.setattr("vllm_antkv.evaluate.report.write_json", on_a_full_disk)
    del perplexity_args["--method"]
    args = flat(model_folder, {**perplexity_args, "--methods": "antkv-1bit,cq-1bit"})
    assert cli.run(["eval", "compare", *args]) == 1
    content = json.loads(perplexity_args["--json"].read_text())
    assert [result["method"] for result in content["results"]] == list(content["fidelity"]) == ["antkv-1bit"]
    assert capsys.readouterr().err.endswith("antkv: No space left on device\n")


def test_calibrate_passes_everything_on(monkeypatch, capsys, tmp_path):
    calls: list[CalibrationSettings] = []
    monkeypatch.setattr(
        "vllm_antkv.calibrate.run.calibrate", lambda settings: calls.append(settings) or [Path("a.file")]
    )
    args = ["MODEL", "--preset", "antkv-1bit", "--text", "A", "--text", "B", "--out", str(tmp_path)]
    assert cli.run(["calibrate", *args]) == 0
    assert calls == [CalibrationSettings("MODEL", ["antkv-1bit"], ["A", "B"], tmp_path)]
    assert capsys.readouterr().out == "a.file\n"
    others = "--samples 3 --seq-len 5 --weights none --channels consecutive --bits uniform --device cpu --seed 7"
    assert cli.run(["calibrate", *args, *others.split(), "--train-steps", "2", "--lora", str(tmp_path)]) == 0
    changed = (3, 5, "none", "consecutive", "uniform", tmp_path, "cpu", 2, 7)
    assert calls[1] == CalibrationSettings("MODEL", ["antkv-1bit"], ["A", "B"], tmp_path, *changed)


@pytest.mark.parametrize("options", [KeptOptions, CacheOptions])
def test_without_options_the_cache_is_the_servers(options):
    assert options().config() == AntKVConfig()


def test_the_version_is_shown(capsys):
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"vllm-antkv {__version__}\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [("antkv pl", ["plan"]), ("antkv eval ta", ["tasks"]), ("antkv plan M --gpu h", ["h100-80", "h200-141"])],
)
def test_the_shell_completes(line, expected):
    environment = {
        **os.environ,
        "_ANTKV_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    command = [Path(sys.executable).with_name("antkv")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr


def test_help_answers_before_heavy_imports():
    code = "import sys; from vllm_antkv import cli; cli.run(['--help']); assert 'transformers' not in sys.modules"
    run_python("-c", code)


# --- what fails; bad command lines: test_bad_arguments.py -------------------------------------------------------------


def test_an_interrupt_ends_quietly(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("vllm_antkv.calibrate.run.calibrate", Mock(side_effect=KeyboardInterrupt))
    assert cli.run(["calibrate", "M", "--preset", "antkv-1bit", "--text", "T", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == ""


def test_a_failed_run_leaves_the_old_result(model_folder, perplexity_args, monkeypatch, capsys):
    perplexity_args["--json"].write_text("old")
    monkeypatch.setattr("os.replace", lambda *args: (_ for _ in ()).throw(OSError("disk full")))
    assert cli.run(["eval", "perplexity", *flat(model_folder, perplexity_args)]) == 1
    assert perplexity_args["--json"].read_text() == "old"
    assert os.listdir(perplexity_args["--json"].parent) == ["out.json"]
    assert "disk full" in capsys.readouterr().err
