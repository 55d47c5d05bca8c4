"""Whatever is wrong with what a user names, every command ends with one sentence and an exit code that is not 0."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.damaged import DAMAGES, shrink_vocabulary, weights_with
from vllm_antkv import cli

#: A command line that fails: its arguments, what it says on stderr.
Fails = Callable[..., tuple[int, str]]


@pytest.fixture
def fails(capsys) -> Fails:
    """Runs a command line that must fail with one sentence; returns the exit code and the sentence."""

    def check(*args: object, **options: object) -> tuple[int, str]:
        given = [part for name, value in options.items() for part in (f"--{name}", value)]
        code = cli.run([str(arg) for arg in (*args, *given)])
        captured = capsys.readouterr()
        assert captured.out == ""
        # Progress bars of what went well before may stand above.
        sentence = captured.err.splitlines()[-1]
        assert sentence.startswith("antkv: ")
        assert captured.err.count("antkv: ") == 1
        assert "Traceback" not in captured.err
        return code, sentence

    return check


@pytest.fixture
def calibrate(fails, model_folder, text_file, tmp_path) -> Fails:
    """`antkv calibrate`, which works unless a model or an option is another."""
    small = {"preset": "antkv-1bit", "samples": 8, "seq-len": 64, "device": "cpu"}
    good = {"text": text_file, "out": tmp_path / "out", **small}
    return lambda model=model_folder, **changes: fails("calibrate", model, **{**good, **changes})


@pytest.fixture
def evaluate(fails, model_folder, codebook_folder, text_file, tmp_path) -> Fails:
    """`antkv eval perplexity`, in the same way."""
    small = {"method": "antkv-1bit", "context": 100, "max-windows": 1}
    good = {"codebooks": codebook_folder, "text": text_file, "json": tmp_path / "o.json", **small}
    return lambda model=model_folder, **changes: fails("eval", "perplexity", model, **{**good, **changes})


@pytest.fixture
def copied(model_folder, tmp_path) -> Path:
    """A model that a test may spoil."""
    return Path(shutil.copytree(model_folder, tmp_path / "model"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model(calibrate, evaluate, copied, tmp_path, damage):
    spoil, words = DAMAGES[damage]
    spoil(copied)
    code, sentence = calibrate(copied)
    assert code == 1
    assert words in sentence
    assert list((tmp_path / "out").glob("*")) == []
    # fp16 needs no codebook, whose check would come first.
    code, sentence = evaluate(copied, method="fp16")
    assert code in (1, 2)
    assert words in sentence


def test_no_model_at_all(calibrate, evaluate, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for model in (tmp_path / "missing", tmp_path / "file", tmp_path / "folder", "", "no such/name", "no/such-model"):
        assert "No model can be read" in calibrate(model)[1]
        assert "No model can be read" in evaluate(model)[1]


@pytest.mark.parametrize("damage", ["config missing", "config with words for numbers", "tokenizer cut"])
def test_served_reads_the_model_before_it_starts_an_engine(fails, copied, text_file, tmp_path, damage):
    spoil, words = DAMAGES[damage]
    spoil(copied)
    options = {"kv-cache-dtype": "antkv-1bit", "text": text_file, "json": tmp_path / "o.json"}
    code, sentence = fails("eval", "served", copied, **options)
    assert (code, words in sentence) == (2, True)


def test_a_tokenizer_of_another_model(calibrate, evaluate, copied):
    shrink_vocabulary(copied, 30)
    code, sentence = calibrate(copied)
    assert (code, "belongs to another model" in sentence) == (1, True)
    code, sentence = evaluate(copied, method="fp16")
    assert (code, "belongs to another model" in sentence) == (2, True)


def test_weights_that_are_not_numbers(calibrate, evaluate, copied, tmp_path):
    weights_with(lambda tensors: [tensor.fill_(torch.nan) for tensor in tensors.values()])(copied)
    assert calibrate(copied)[0] == 1
    code, sentence = evaluate(copied)
    assert (code, "not a number" in sentence) == (1, True)
    assert not (tmp_path / "o.json").exists()


def test_folders_that_cannot_be_written(calibrate, evaluate, tmp_path):
    file, closed = tmp_path / "file", tmp_path / "closed"
    file.touch()
    closed.mkdir(mode=0o500)
    # Who may write anywhere, as root may, still cannot write into /proc.
    unwritable = Path("/proc") if os.access(closed, os.W_OK) else closed
    for out in (file, file / "below", unwritable):
        code, sentence = calibrate(out=out)
        assert (code, f"{out} cannot be written" in sentence) == (1, True)
        code, sentence = evaluate(json=out / "o.json")
        assert (code, "cannot be written" in sentence) == (2, True)
    assert "is a folder" in evaluate(json=tmp_path)[1]


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name.startswith("config")])
def test_doctor_reports_a_damaged_config(copied, capsys, damage):
    DAMAGES[damage][0](copied)
    assert cli.run(["doctor", str(copied)]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
