"""Whatever is wrong with what a user names, every command ends with one sentence and an exit code that is not 0."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.damaged import DAMAGES, WEIGHTS, damaged, shrink_vocabulary, weights_with
from tests.unit.evaluate.conftest import *  # noqa: F403  (the tiny model, its codebooks and text)
from vllm_antkv import cli

#: A command line that fails: its arguments, what it says on stderr.
Fails = Callable[..., tuple[int, str]]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs a command line that must fail with one sentence; returns the exit code and the sentence."""

    def check(*args: object) -> tuple[int, str]:
        code = cli.run([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert captured.out == ""
        # Progress bars of what went well before may stand above.
        sentence = captured.err.splitlines()[-1]
        assert sentence.startswith("antkv: ")
        assert captured.err.count("antkv: ") == 1
        assert "Traceback" not in captured.err
        return code, sentence

    return check


def calibration(model: Path, text: Path, out: Path, **changes: Any) -> list[object]:
    options = {"preset": "antkv-1bit", "text": text, "out": out, "samples": 8, "seq-len": 64, "device": "cpu"}
    return ["calibrate", model, *_flat({**options, **changes})]


def evaluation(model: Path, text: Path, codebooks: Path, json: Path, **changes: Any) -> list[object]:
    options = {"method": "antkv-1bit", "codebooks": codebooks, "text": text, "json": json, "context": 100}
    return ["eval", "perplexity", model, *_flat({**options, "max-windows": 1, **changes})]


def _flat(options: dict[str, Any]) -> list[object]:
    return [part for name, value in options.items() for part in (f"--{name}", value)]


@pytest.fixture
def no_text(tmp_path: Path) -> dict[str, Path]:
    """Files that are no text."""
    paths = {name: tmp_path / name for name in ("missing", "folder", "empty", "binary")}
    paths["folder"].mkdir()
    paths["empty"].touch()
    paths["binary"].write_bytes(bytes(range(256)) * 50)
    return paths


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model(
    fails: Fails, model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path, damage: str
) -> None:
    model = damaged(model_folder, tmp_path / "model", damage)
    words = DAMAGES[damage][1]
    code, sentence = fails(*calibration(model, text_file, tmp_path / "out"))
    assert code == 1
    assert words in sentence
    assert list((tmp_path / "out").glob("*")) == []
    # fp16 needs no codebook, whose check would come first.
    code, sentence = fails(*evaluation(model, text_file, codebook_folder, tmp_path / "o.json", method="fp16"))
    assert code in (1, 2)
    assert words in sentence


def test_no_model_at_all(fails: Fails, codebook_folder: Path, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for model in (tmp_path / "missing", tmp_path / "file", tmp_path / "folder", "", "no such/name", "no/such-model"):
        assert "No model can be read" in fails(*calibration(model, text_file, tmp_path / "out"))[1]
        assert "No model can be read" in fails(*evaluation(model, text_file, codebook_folder, tmp_path / "o.json"))[1]


@pytest.mark.parametrize("damage", ["config missing", "config with words for numbers", "tokenizer cut"])
def test_served_reads_the_model_before_it_starts_an_engine(
    fails: Fails, model_folder: Path, text_file: Path, tmp_path: Path, damage: str
) -> None:
    model = damaged(model_folder, tmp_path / "model", damage)
    options = {"kv-cache-dtype": "antkv-1bit", "text": text_file, "json": tmp_path / "o.json"}
    code, sentence = fails("eval", "served", model, *_flat(options))
    assert (code, DAMAGES[damage][1] in sentence) == (2, True)


def test_a_tokenizer_of_another_model(
    fails: Fails, model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    shrink_vocabulary(model, 30)
    code, sentence = fails(*calibration(model, text_file, tmp_path / "out"))
    assert (code, "belongs to another model" in sentence) == (1, True)
    code, sentence = fails(*evaluation(model, text_file, codebook_folder, tmp_path / "o.json", method="fp16"))
    assert (code, "belongs to another model" in sentence) == (2, True)


def test_weights_that_are_not_numbers(
    fails: Fails, model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder, model)
    weights_with(lambda tensors: [tensor.fill_(torch.nan) for tensor in tensors.values()])(model)
    assert (model / WEIGHTS).exists()
    assert fails(*calibration(model, text_file, tmp_path / "out"))[0] == 1
    code, sentence = fails(*evaluation(model, text_file, codebook_folder, tmp_path / "o.json"))
    assert (code, "not a number" in sentence) == (1, True)
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "binary"])
def test_no_text(
    fails: Fails,
    model_folder: Path,
    codebook_folder: Path,
    no_text: dict[str, Path],
    tmp_path: Path,
    kind: str,
) -> None:
    text = no_text[kind]
    code, sentence = fails(*calibration(model_folder, text, tmp_path / "out"))
    assert (code, str(text) in sentence) == (1, True)
    code, sentence = fails(*evaluation(model_folder, text, codebook_folder, tmp_path / "o.json"))
    assert (code, str(text) in sentence) == (2, True)


def test_folders_that_cannot_be_written(
    fails: Fails, model_folder: Path, codebook_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    file, closed = tmp_path / "file", tmp_path / "closed"
    file.touch()
    closed.mkdir(mode=0o500)
    # Who may write anywhere, as root may, still cannot write into /proc.
    unwritable = Path("/proc") if os.access(closed, os.W_OK) else closed
    for out in (file, file / "below", unwritable):
        code, sentence = fails(*calibration(model_folder, text_file, out))
        assert (code, f"{out} cannot be written" in sentence) == (1, True)
        code, sentence = fails(*evaluation(model_folder, text_file, codebook_folder, out / "o.json"))
        assert (code, "cannot be written" in sentence) == (2, True)
    assert "is a folder" in fails(*evaluation(model_folder, text_file, codebook_folder, tmp_path))[1]


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name.startswith("config")])
def test_doctor_reports_a_damaged_config(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    assert cli.run(["doctor", str(damaged(model_folder, tmp_path / "model", damage))]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
