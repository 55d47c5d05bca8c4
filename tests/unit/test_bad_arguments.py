"""Command lines that cannot be run, one a row: one sentence, exit code 2 or 1, and nothing is written.

Damaged models and texts: `tests/unit/test_cli_mistakes.py`.
"""

from pathlib import Path

import pytest

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
    ("serve", [], 2, "No such command"),
    ("calibrate", [], 2, "Missing argument 'MODEL'"),
    (CALIBRATE, ["--verbose"], 2, "No such option"),
    (CALIBRATE, ["--preset", "auto"], 2, "Unknown preset 'auto'"),
    (CALIBRATE, ["--samples", "0"], 2, AT_LEAST),
    (CALIBRATE, ["--samples", "1.5"], 2, INTEGER),
    (CALIBRATE, ["--samples", "9" * 5000], 2, "--samples"),
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
    (PERPLEXITY, ["--recency", LONG], 2, "must be sliding:W"),
    (PERPLEXITY, ["--context", "1"], 2, AT_LEAST),
    (PERPLEXITY, ["--context", "4096"], 2, "made for 512 tokens"),
    (PERPLEXITY, ["--max-windows", "0"], 2, AT_LEAST),
    (PERPLEXITY, ["--codebooks", "/none"], 1, "antkv calibrate"),
    (PERPLEXITY, ["--codebooks", "two\nlines"], 2, "control characters"),
    (PERPLEXITY, ["--codebooks", LONG], 2, "no path has more than"),
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
def test_a_bad_command_line(line, added, code, words, places, tmp_path, capsys):
    assert cli.run([str(places.get(word, word)) for word in [*line.split(), *added]]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    sentence = captured.err.splitlines()[-1]
    assert sentence.startswith("antkv: ")
    assert words in sentence
    assert len(sentence.replace(LONG, "")) < 1200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("folder", ["/none", "/dev/null", "/proc/self/mem", "", "two\nlines", LONG])
def test_doctor_reports_a_bad_folder_of_codebooks(folder, capsys):
    assert cli.run(["doctor", "--codebooks", folder]) == 1
    captured = capsys.readouterr()
    assert "problem" in captured.out
    assert "Traceback" not in captured.out + captured.err
