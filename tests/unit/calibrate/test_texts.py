"""Texts become windows: BOS first, no more than asked for, drawn from all over, reproducible."""

import sys
from unittest.mock import Mock

import torch

from vllm_antkv.calibrate.texts import Text, built_in_text, read_text, text_hash, token_windows
from vllm_antkv.errors import CalibrationError


def test_windows_begin_with_bos_and_hold_the_text(tokenizer, text_file):
    text = read_text(str(text_file))
    windows = token_windows([text], tokenizer, 8, 64, 0)
    assert windows.shape == (8, 64)
    assert windows.dtype == torch.int64
    assert (windows[:, 0] == tokenizer.bos_token_id).all()
    assert (windows[:, 1:] != tokenizer.bos_token_id).all()
    for window in windows[:3]:
        assert tokenizer.decode(window[1:20]) in text.content


def test_a_tokenizer_without_bos_fills_whole_windows(tokenizer, text_file):
    without_bos = Mock(wraps=tokenizer, bos_token_id=None)
    windows = token_windows([read_text(str(text_file))], without_bos, 4, 64, 0)
    assert windows.shape == (4, 64)
    assert (windows != tokenizer.bos_token_id).all()


def test_the_seed_sets_the_windows(tokenizer, text_file):
    text = [read_text(str(text_file))]
    first, again, other = (token_windows(text, tokenizer, 4, 64, seed) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_short_text_gives_fewer_windows(tokenizer):
    text = Text("short", "river walks under seven bridges " * 40)
    num_tokens = len(tokenizer(text.content)["input_ids"])
    assert len(token_windows([text], tokenizer, 100, 32, 0)) == num_tokens // 31


def test_too_short_for_one_window(tokenizer, refused):
    with refused(CalibrationError, "--seq-len"):
        token_windows([Text("short", "why")], tokenizer, 4, 64, 0)


def test_a_large_text_is_tokenised_only_as_far_as_needed(tokenizer):
    counting = Mock(wraps=tokenizer, bos_token_id=0)
    token_windows([Text("large", "stone river " * 200_000)], counting, 2, 64, 0)
    assert 0 < sum(len(call.args[0]) for call in counting.call_args_list) <= 2 * 16 * 64


def test_all_texts_are_drawn_from(tokenizer):
    texts = [Text("a", "stone " * 5000), Text("b", "river " * 5000)]
    words = tokenizer.decode(token_windows(texts, tokenizer, 100, 64, 0).flatten())
    assert "stone" in words
    assert "river" in words


def test_the_hash_tells_texts_apart():
    assert text_hash([Text("a", "xy")]) == text_hash([Text("b", "xy")])
    assert len({text_hash([Text("a", "xy")]), text_hash([Text("a", "x"), Text("a", "y")]), text_hash([])}) == 3


def test_a_data_set_without_the_library(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(CalibrationError, "pip install datasets"):
        read_text("no/such-set")


def test_the_text_of_the_package_fills_the_default_windows_of_a_tokenizer_of_english(tokenizer):
    text = built_in_text()
    assert len(text.content) > 4 * 128 * 2048
    windows = token_windows([text], tokenizer, 2, 2048, 0)
    assert windows.shape == (2, 2048)
    # Special tokens in it would begin documents in the middle of a passage.
    assert (windows[:, 1:] > tokenizer.eos_token_id).all()
