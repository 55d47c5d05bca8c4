"""From files to windows of token ids."""

import json

import pytest
from transformers import AutoTokenizer

from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate.windows import load_windows


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def ids_file(tmp_path):
    return tmp_path / "some_ids.json"


def test_text_is_cut_in_order_with_bos_before_every_window_and_the_first_are_taken(tokenizer, text_file):
    windows = load_windows(text_file, tokenizer, context=64)
    assert windows.shape == (1000 // 63, 64)
    assert (windows[:, 0] == 1).all()
    words = [int(word[1:]) for word in text_file.read_text().split()]
    assert windows[:, 1:].flatten().tolist() == words[: 15 * 63]
    assert load_windows(text_file, tokenizer, 64, max_windows=2).tolist() == windows[:2].tolist()


def test_without_bos_windows_are_all_text(model_folder, text_file):
    tokenizer = AutoTokenizer.from_pretrained(model_folder, bos_token=None)
    windows = load_windows(text_file, tokenizer, context=100)
    assert windows.shape == (10, 100)


def test_exact_ids_are_taken_as_they_are(tokenizer, ids_file):
    ids_file.write_text("[[1, 5, 6, 7], [1, 9, 10, 11, 12]]")
    assert load_windows(ids_file, tokenizer, context=4).tolist() == [[1, 5, 6, 7], [1, 9, 10, 11]]
    assert load_windows(ids_file, tokenizer, context=3).tolist() == [[1, 5, 6], [1, 9, 10]]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([[1, 5], [1, 5, 6, 7]], "window of 2 tokens"),
        ([], "list of windows"),
        ([1, 2, 3, 4], "list of windows"),
        ({"windows": []}, "list of windows"),
        ([["a", "b", "c", "d"]], "list of windows"),
        ([[1, 2, 3, 999]], "vocabulary: 64"),
        ([[1, 2, 3, -1]], "vocabulary: 64"),
    ],
)
def test_ids_that_cannot_be_used(tokenizer, ids_file, refused, content, words):
    ids_file.write_text(json.dumps(content))
    with refused(SettingsError, words):
        load_windows(ids_file, tokenizer, context=4)


def test_text_that_cannot_be_used(tokenizer, tmp_path, text_file, refused):
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, context in ((tmp_path / "missing.txt", 8), (tmp_path, 8), (binary, 8), (text_file, 1002)):
        with refused(SettingsError):
            load_windows(path, tokenizer, context)
