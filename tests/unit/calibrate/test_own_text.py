"""Text that a model writes itself: how its windows begin and go on, and codebooks that are learned from it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.unit.calibrate.test_run import SMALL
from vllm_antkv.calibrate import own_text
from vllm_antkv.calibrate.own_text import SEEDS, write_windows
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.codebook import Codebook
from vllm_antkv.errors import CalibrationError

BOS, EOS = 0, 1


def counts(model: nn.Module) -> None:
    """Edit a model so that after token t it is certain of t + 1."""
    generator = torch.Generator().manual_seed(0)
    # A text longer than the order of the vocabulary: many channels, in which embeddings hardly resemble each other.
    embeddings = torch.randn(model.lm_head.weight.shape, generator=generator)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embeddings)
        model.lm_head.weight.copy_(embeddings.roll(1, 0))


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write(model: nn.Module, tokenizer: Any, num_windows: int, seq_len: int, seed: int = 0) -> torch.Tensor:
    return write_windows(model, tokenizer, (num_windows, seq_len), seed, lambda: None)


def test_it_goes_on_as_the_model_predicts_and_begins_anew_where_a_document_ends(
    make_model: Callable[..., Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    windows = write(load(make_model("llama", counts, hidden_size=512)), tokenizer, 8, 100)
    assert windows.dtype == torch.int64
    assert (windows[:, 0] == BOS).all()
    # Without a seed, EOS follows BOS here; what follows EOS is BOS.
    assert (windows[::2, 1::2] == EOS).all()
    assert (windows[::2, 2::2] == BOS).all()
    for window, seed in zip(windows[1::2].tolist(), SEEDS, strict=False):
        ids = tokenizer(seed, add_special_tokens=False)["input_ids"]
        assert window[1 : 1 + len(ids)] == ids
        written = window[len(ids) :]
        assert written == list(range(written[0], written[0] + len(written)))


def test_without_bos_every_window_begins_with_a_seed(tiny_llama: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    windows = write(load(tiny_llama), bare, len(SEEDS), 16)
    for window, seed in zip(windows.tolist(), SEEDS, strict=True):
        ids = bare(seed)["input_ids"]
        assert window[: len(ids)] == ids


def test_tokens_are_as_surprising_as_the_model_says(tiny_llama: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """At temperature 1 the mean surprise of what was drawn is the mean entropy; colder it is less, hotter more."""
    model = load(tiny_llama)
    windows = write(model, tokenizer, 64, 100)[::2]
    with torch.inference_mode():
        predicted = model(windows).logits[:, :-1].log_softmax(-1)
    free = windows[:, :-1] != EOS
    surprise = -predicted.gather(-1, windows[:, 1:, None])[..., 0][free]
    entropy = -(predicted.exp() * predicted).sum(-1)[free]
    colder = 2 * predicted
    colder -= colder.logsumexp(-1, keepdim=True)
    surprise_if_colder = -(colder.exp() * predicted).sum(-1)[free].mean()
    spread = float((surprise - entropy).std()) / len(surprise) ** 0.5
    assert abs(float((surprise - entropy).mean())) < 4 * spread
    assert float(entropy.mean() - surprise_if_colder) > 8 * spread


def test_same_seed_same_text(
    tiny_llama: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text, "BATCH", 3)
    model = load(tiny_llama)
    first = write(model, tokenizer, 4, 32)
    assert first.shape == (4, 32)
    assert torch.equal(first, write(model, tokenizer, 4, 32))
    assert not torch.equal(first, write(model, tokenizer, 4, 32, seed=1))


def test_a_model_that_predicts_nothing_is_refused(
    tiny_llama: Path, tokenizer: PreTrainedTokenizerFast, reads_well: Callable[[BaseException], str]
) -> None:
    model = load(tiny_llama)
    model.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(CalibrationError) as refused:
        write(model, tokenizer, 1, 8)
    assert "not finite" in reads_well(refused.value)


def test_a_codebook_without_a_text_is_the_same_again_and_says_so(tiny_llama: Path, tmp_path: Path) -> None:
    files = []
    for name in ("first", "again"):
        settings = CalibrationSettings(str(tiny_llama), ["antkv-1bit"], [], tmp_path / name, **SMALL)
        files += calibrate(settings)
    assert files[0].read_bytes() == files[1].read_bytes()
    record = Codebook.load(files[0]).header.calibration
    assert record["texts"] == [own_text.NAME]
    assert len(record["text_sha256"]) == 64
    assert record["tokens"] == 8 * 63
