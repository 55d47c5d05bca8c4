"""`antkv doctor MODEL --verify` on a trained model: real engines, and an exit code that says what they answered."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.serving.conftest import EMBEDDED
from tests.serving.tiny import FAMILY, make_coded, make_model
from vllm_antkv import cli
from vllm_antkv.doctor import verify


def answers(capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, Any]]]:
    """The exit code, and the findings about answers."""
    code = cli.run(["doctor", str(EMBEDDED), "--verify", "--json", "-"])
    return code, json.loads(capsys.readouterr().out)["sections"]["Answers"]


def test_a_model_that_answers_the_same_is_said_to(quick_engines, capsys):
    code, findings = answers(capsys)
    assert code == 0
    assert [finding["what"] for finding in findings] == ["in a batch, chunked", "alone, prefix hits"]
    assert all("the same answers" in finding["detail"] for finding in findings)


def test_a_model_that_answers_otherwise_is_a_problem(quick_engines, capsys, monkeypatch):
    """As one whose rows are not what they should be: here they are left to their codes."""
    monkeypatch.setattr(verify, "EXACT", {"recency": "none", "prefix": 0, "anchor_share": 0.0, "sinks": False})
    code, findings = answers(capsys)
    assert code == 1
    assert all("other answers" in finding["detail"] and finding["state"] == "problem" for finding in findings)


def doctor(model: Path, *options: str) -> list[dict[str, Any]]:
    """The findings about answers, as a user gets them."""
    antkv = Path(sys.executable).with_name("antkv")
    command = [antkv, "doctor", str(model), "--verify", "--json", "-", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    found: list[dict[str, Any]] = json.loads(done.stdout)["sections"]["Answers"]
    return found


def test_layers_that_ask_for_a_dtype_get_it_and_an_engine_s_own_sentence_is_shown(tmp_path):
    """vLLM's gated delta nets have code for bfloat16 alone on CPUs."""
    model = make_coded(tmp_path, *FAMILY["qwen3 next"])
    assert all("the same answers" in finding["detail"] for finding in doctor(model))
    (finding,) = doctor(model, "--dtype", "float32")
    assert "CPU GDN attention requires BF16" in finding["detail"]


@pytest.mark.usefixtures("quick_engines")
def test_a_model_that_vllm_itself_cannot_run_is_a_problem(tmp_path) -> None:
    """As one whose tokenizer knows more tokens than it has: vLLM starts, and fails at the first prompt."""
    model = make_model(tmp_path, "llama", {"vocab_size": 64})
    (finding,) = verify.check_answers(str(model), None)
    assert finding.state == "problem"
    assert "vLLM cannot answer with this model and --kv-cache-dtype auto" in finding.detail
    assert "without an antkv cache" in finding.remedy
