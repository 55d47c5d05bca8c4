"""Training the intact prefix: it lowers the error on text it does not see, or is not kept."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.codebooks import random_codebook
from vllm_antkv.calibrate import prefix
from vllm_antkv.calibrate.prefix import train_prefix
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.texts import prefix_ids, with_prefix
from vllm_antkv.calibrate.training import Progress, Schedule
from vllm_antkv.codebook import Codebook, ModelIdentity
from vllm_antkv.codebook.prefix import TrainedPrefix
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CalibrationError

IDS = (0, 7, 42)
SMALL = {"samples": 4, "seq_len": 288, "device": "cpu"}


@pytest.fixture(scope="module")
def long_llama(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(long_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(long_llama).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def codebook(model: PreTrainedModel) -> Codebook:
    """Centroids of nothing: what is read through them is far from what it was."""
    k, v = torch.zeros(2, 2, 2, 2, 256, 8).half()
    return replace(random_codebook(ModelIdentity.from_hf_config(model.config)), k=tuple(k), v=tuple(v))


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    windows = torch.randint(300, (20, 256), generator=torch.Generator().manual_seed(0))
    windows[:, 0] = IDS[0]
    return with_prefix(windows, IDS)


def test_windows_start_with_the_prefix_and_go_on_with_their_text(windows: torch.Tensor) -> None:
    text = torch.randint(300, (20, 256), generator=torch.Generator().manual_seed(0))
    assert windows.shape == text.shape
    assert windows[3, :3].tolist() == list(IDS)
    assert torch.equal(windows[:, 3:], text[:, 1:-2])
    assert torch.equal(with_prefix(text.clamp(min=1), (0,))[:, 1:], text.clamp(min=1)[:, :-1]), "no BOS, none lost"


@pytest.mark.long
def test_the_first_error_is_that_of_the_plain_prefix_and_training_lowers_it(
    model, codebook, windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(learning_rate: float) -> tuple[TrainedPrefix | None, tuple[float, float]]:
        monkeypatch.setattr(prefix, "_LEARNING_RATE", learning_rate)
        schedule = Schedule(10, 0, Progress(), lambda progress: None, lambda done: None)
        return train_prefix(model, codebook, IDS, windows, schedule)

    standing, standing_loss = run(0.0)
    trained, loss = run(0.002)
    assert standing is None, "rows that are not better are not kept"
    assert loss[0] == standing_loss[0] == standing_loss[1]
    assert loss[1] < loss[0]
    assert trained.token_ids == IDS
    # Untrained rows are the model's own, K after RoPE.
    own = torch.stack(prefix._own_rows(model, IDS))
    with torch.no_grad():
        layers = model(windows[:1], use_cache=True).past_key_values.layers
    expected = torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in layers], 1)[:, :, :, :3]
    assert torch.allclose(own, expected.transpose(2, 3), atol=1e-5)
    assert trained.k.shape == trained.v.shape == own[0].shape


@pytest.mark.long
def test_calibrate_writes_the_prefix_into_the_codebook(
    long_llama: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    # The text is soon known by heart: hardly anything is lost through codes that are read late.
    monkeypatch.setattr(prefix, "TRAINING", AntKVConfig(anchor_share=0.0, sinks=False, recency="none", prefix=0))
    # Few steps, so larger ones. On random weights they help with some centroids only: with these they do.
    monkeypatch.setattr("vllm_antkv.calibrate.write_codebook.PREFIX_STEPS", 6)
    monkeypatch.setattr(prefix, "_LEARNING_RATE", 0.002)
    small = {**SMALL, "seed": 4, "bits": "uniform"}
    system_prompt = tmp_path / "system.txt"
    system_prompt.write_text("never asks why")
    command = (str(long_llama), ["antkv-1bit"], [str(text_file)])
    plain = Codebook.load(calibrate(CalibrationSettings(*command, tmp_path / "plain", **small))[0])
    trained = Codebook.load(
        calibrate(
            CalibrationSettings(
                *command, tmp_path / "trained", train_prefix=True, prefix_text=str(system_prompt), **small
            )
        )[0]
    )
    assert plain.prefix is None
    assert all(map(torch.equal, plain.k, trained.k))
    before, after = trained.header.calibration["prefix_loss"]
    assert after < before
    assert f"held-out text {before:.5g} -> {after:.5g}\n" in capsys.readouterr().err
    assert trained.prefix.token_ids[0] == 0
    assert len(trained.prefix.token_ids) > 1


def test_prompts_that_start_with_no_bos_need_a_text(tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "system.txt"
    text.write_text("never asks")
    without_bos = deepcopy(tokenizer)
    without_bos.bos_token = None
    with pytest.raises(CalibrationError, match="--prefix-text"):
        prefix_ids(without_bos, None)
    assert prefix_ids(tokenizer, str(text)) == (0, *prefix_ids(without_bos, str(text)))
    assert prefix_ids(tokenizer, None) == (0,)


def test_what_cannot_be_trained_is_refused_before_any_work(long_llama: Path, text_file: Path, tmp_path: Path) -> None:
    def refuse(model: Path, **settings) -> None:
        settings = {"train_prefix": True, "device": "cpu", **settings}
        calibrate(CalibrationSettings(str(model), ["antkv-1bit"], [str(text_file)], tmp_path / "out", **settings))

    with pytest.raises(CalibrationError, match="--train-prefix judges by windows"):
        refuse(long_llama, samples=1, seq_len=512)
    with pytest.raises(CalibrationError, match="--seq-len 257 or more"):
        refuse(long_llama, samples=8, seq_len=256)
    with pytest.raises(CalibrationError, match="4096"):
        refuse(long_llama, samples=8, seq_len=512, prefix_text=str(text_file))
    with pytest.raises(CalibrationError, match="give both"):
        refuse(long_llama, train_prefix=False, prefix_text=str(text_file))
    with pytest.raises(CalibrationError, match="no text file"):
        refuse(long_llama, prefix_text="missing.txt")
    assert not (tmp_path / "out").exists()
