"""A model whose code in transformers hands its K and V to nobody: vLLM runs it for its codebook, and serves it."""

from pathlib import Path

import pytest

from tests.codebooks import random_codebook
from tests.serving.conftest import PRESET, TEXT
from tests.serving.tiny import make_model
from vllm_antkv import cli
from vllm_antkv.codebook import Codebook, RopeLayout, codebook_path
from vllm_antkv.doctor.verify import check_answers
from vllm_antkv.offline.models import ModelCard


@pytest.fixture(scope="module")
def gpt_j(tmp_path_factory) -> Path:
    """Half of its channels turn, neighbours together."""
    return make_model(tmp_path_factory.mktemp("gpt-j"), "gptj", {"rotary_dim": 16, "num_key_value_heads": 4})


@pytest.mark.usefixtures("quick_engines")
def test_it_is_calibrated_and_answers_as_without_the_cache(gpt_j, capsys) -> None:
    command = ["calibrate", str(gpt_j), "--preset", PRESET, "--text", str(TEXT), "--out", str(gpt_j / "antkv")]
    assert cli.run([*command, "--samples", "3", "--seq-len", "128"]) == 0
    assert "as transformers' code of this model does not hand them over" in capsys.readouterr().err
    header = Codebook.load(codebook_path(gpt_j / "antkv", PRESET)).header
    assert header.turns == (RopeLayout(rotary_dim=16, neighbours=True),) * 2
    assert header.calibration["weights"] == "votes"
    findings = list(check_answers(str(gpt_j), None))
    assert [finding.state for finding in findings] == ["ok", "ok"], findings


def test_what_needs_transformers_code_is_refused(gpt_j, tmp_path, capsys):
    text, out = ["--text", str(TEXT)], ["--out", str(tmp_path)]
    (tmp_path / "adapter_config.json").write_text("{}")
    assert cli.run(["calibrate", str(gpt_j), "--preset", PRESET, *text, *out, "--lora", str(tmp_path)]) == 1
    assert "does not hand them over: leave --lora out." in capsys.readouterr().err
    random_codebook(ModelCard.read(str(gpt_j)).identity).save(codebook_path(tmp_path, PRESET))
    report = ["--codebooks", str(tmp_path), "--json", str(tmp_path / "report.json"), "--context", "64"]
    assert cli.run(["eval", "compare", str(gpt_j), "--methods", PRESET, *text, *report, "--max-windows", "1"]) == 1
    assert "it cannot be evaluated offline, but by `antkv eval served`." in capsys.readouterr().err
