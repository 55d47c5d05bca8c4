"""Command lines that cannot be run, and models and texts that cannot be used.

Whatever is wrong, a command ends with one sentence and an exit code that is not 0, and nothing is written.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.unit.damaged import DAMAGES, shrink_vocabulary, weights_with
from vllm_antkv import cli

CALIBRATE = "calibrate MODEL --preset antkv-1bit --text TEXT --out NEW --samples 8 --seq-len 64 --device cpu"
PERPLEXITY = "eval perplexity MODEL --method antkv-1bit --codebooks BOOKS --text TEXT --json NEW --context 100"
COMPARE = "eval compare MODEL --methods fp16,antkv-1bit --codebooks BOOKS --text TEXT --json NEW --context 100"
SERVED = "eval served MODEL --kv-cache-dtype antkv-1bit --codebooks BOOKS --text TEXT --json NEW --context 100"
TASKS = "eval tasks MODEL --tasks no-such-task --json NEW"
LONG = "x" * 5000
NUMBER, INTEGER = "should be a valid number", "should be a valid integer"
AT_LEAST, AT_MOST = "should be greater than or equal to", "should be less than or equal to"

#: The command line, what is added to it (an option given twice has its last value), exit code, words of the sentence.
TABLE: list[tuple[str, list[str], int, str]] = [
    ("", [], 2, "Missing command"),
    ("calibrate", [], 2, "Missing argument 'MODEL'"),
    (CALIBRATE, ["--preset", "auto"], 2, "Unknown preset 'auto'"),
    (CALIBRATE, ["--samples", "0"], 2, AT_LEAST),
    (CALIBRATE, ["--samples", "1.5"], 2, INTEGER),
    (CALIBRATE, ["--seq-len", "1"], 2, AT_LEAST),
    (CALIBRATE, ["--seed", "-1"], 1, "--seed -1"),
    (CALIBRATE, ["--weights", "GRAD"], 2, "--weights"),
    (CALIBRATE, ["--device", "gpu"], 1, "Device 'gpu'"),
    (CALIBRATE, ["--device", "cuda:99"], 1, "Device 'cuda:99'"),
    (CALIBRATE, ["--device", "meta"], 1, "Device 'meta'"),
    (CALIBRATE, ["--text", ""], 1, "'' is a folder"),
    (CALIBRATE, ["--text", "/dev/null"], 1, "/dev/null"),
    (CALIBRATE, ["--text", "/proc/self/mem"], 1, "cannot be read as plain text"),
    (CALIBRATE, ["--text", "two\nlines"], 1, "two lines"),
    (CALIBRATE, ["--out", LONG], 1, "File name too long"),
    (PERPLEXITY, ["--method", "rtn-2bit"], 2, "Unknown method 'rtn-2bit'"),
    (PERPLEXITY, ["--anchors", "nan"], 2, AT_MOST),
    (PERPLEXITY, ["--anchors", "1%"], 2, NUMBER),
    (PERPLEXITY, ["--sinks", "-1"], 2, AT_LEAST),
    (PERPLEXITY, ["--prefix", "4097"], 2, AT_MOST),
    (PERPLEXITY, ["--recency", "OWN"], 2, "'OWN' must be sliding:W"),
    (PERPLEXITY, ["--context", "1"], 2, AT_LEAST),
    (PERPLEXITY, ["--context", "4096"], 2, "made for 512 tokens"),
    (PERPLEXITY, ["--max-windows", "0"], 2, AT_LEAST),
    (PERPLEXITY, ["--codebooks", "/none"], 1, "antkv calibrate"),
    (PERPLEXITY, ["--codebooks", "TEXT"], 1, "antkv calibrate"),
    (PERPLEXITY, ["--json", "/none/out.json"], 2, "cannot be written"),
    (PERPLEXITY, ["--text", "/dev/null"], 2, "/dev/null"),
    (COMPARE, ["--methods", ""], 2, "Unknown method ''"),
    (COMPARE, ["--methods", "fp16,cq-1bit,fp99"], 2, "Unknown method 'fp99'"),
    (SERVED, ["--kv-cache-dtype", "antkv"], 2, "must be one of"),
    (SERVED, ["--kv-cache-dtype", "auto", "--against", "fp16"], 2, "must be one of"),
    (TASKS, [], 2, "Say what to evaluate"),
    (TASKS, ["--kv-cache-dtype", "auto", "--server", "auto=http://localhost:1"], 2, "Say what to evaluate"),
    (TASKS, ["--kv-cache-dtype", "auto,fp16"], 2, "must be one of"),
    (TASKS, ["--server", "http://localhost:1"], 2, "must be NAME=URL"),
]


@pytest.fixture
def places(model_folder, codebook_folder, text_file, tmp_path, monkeypatch) -> dict[str, Path]:
    """What words in capitals stand for. A name without a folder would end up in the test's."""
    monkeypatch.chdir(tmp_path)
    return {"MODEL": model_folder, "BOOKS": codebook_folder, "TEXT": text_file, "NEW": tmp_path / "new"}


@pytest.mark.parametrize(("line", "added", "code", "words"), TABLE, ids=lambda value: str(value)[:40])
def test_a_bad_command_line(line, added, code, words, fails, places, tmp_path):
    ended, sentence = fails(*(places.get(word, word) for word in [*line.split(), *added]))
    assert (ended, words in sentence) == (code, True)
    assert len(sentence.replace(LONG, "")) < 1200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/none", "/dev/null", "/proc/self/mem", "", "two\nlines", LONG])
def test_doctor_reports_a_bad_folder_of_codebooks(folder, capsys):
    assert cli.run(["doctor", "--codebooks", folder]) == 1
    captured = capsys.readouterr()
    assert "problem" in captured.out
    assert "Traceback" not in captured.out + captured.err


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
