"""Trained centroids: predictions are closer to the model's own, on other text too; the same command, the same bytes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.places import EMBEDDED
from vllm_antkv.calibrate import resources, write_codebook
from vllm_antkv.calibrate import train as train_module
from vllm_antkv.calibrate.capture import checkpointed
from vllm_antkv.calibrate.job import prepare
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.train import train
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.attention import attend_window
from vllm_antkv.offline.divergences import served_method
from vllm_antkv.offline.method import LayerWindow
from vllm_antkv.offline.score import score
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable

PRESETS = ["antkv-1bit", "antkv-0.5bit"]
SMALL: dict[str, Any] = {"samples": 6, "seq_len": 384, "device": "cpu"}
NUM_STEPS = 40


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """Codebooks of the embedded model, from the package's text, as k-means leaves them."""
    out = tmp_path_factory.mktemp("learned")
    calibrate(CalibrationSettings(str(EMBEDDED), PRESETS, [], out, **SMALL))
    return out


@pytest.fixture(scope="module")
def book(learned) -> Codebook:
    return Codebook.load(codebook_path(learned, PRESETS[0]))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(EMBEDDED).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def windows(learned) -> torch.Tensor:
    """(44, 384)."""
    return prepare(CalibrationSettings(str(EMBEDDED), PRESETS, [], learned, **{**SMALL, "samples": 44})).windows


def divergence(model: PreTrainedModel, book: Codebook, windows: torch.Tensor) -> float:
    fidelity = score(model, served_method(book), windows, against_own=True).fidelity
    assert fidelity is not None
    return fidelity.kl


def test_predictions_come_closer_on_other_text_too(model, book, windows):
    steps: list[None] = []
    mine, others = windows.split((40, 4))
    found = train(model, book, mine, NUM_STEPS, lambda: steps.append(None))
    assert len(steps) == NUM_STEPS
    assert divergence(model, found, others) < 0.98 * divergence(model, book, others)
    assert found.header == book.header
    assert torch.equal(found.k_scale, book.k_scale)
    for trained, before in zip((*found.k, *found.v), (*book.k, *book.v), strict=True):
        assert trained.dtype == before.dtype
        assert not torch.equal(trained, before)
    # The correction of a head has one size for all channels.
    ratios = (found.k_errors / book.k_errors).nan_to_num().flatten(0, 1)
    torch.testing.assert_close(ratios, ratios[:, :1].expand_as(ratios))


def test_a_step_moves_no_centroid_far_for_its_channel(model, book, windows):
    """Whatever the other channels are like: one of K may have a bias of a hundred times its spread."""
    biased = replace(book, k=tuple(table + 100.0 * (torch.arange(table.shape[-1]) == 0) for table in book.k))
    found = train(model, biased, windows[:2], 2, lambda: None)
    for trained, before in zip((*found.k, *found.v), (*biased.k, *biased.v), strict=True):
        moved = (trained - before).abs().amax(-2) / before.float().std(-2).clamp_min(1e-6)
        assert moved.max() < 2 * train_module._LEARNING_RATE


def test_each_step_has_a_window_of_its_own_while_there_are_some(model, book, windows, monkeypatch):
    seen: list[int] = []
    pass_back = train_module._pass_back

    def watched(model: PreTrainedModel, book: Codebook, window: torch.Tensor) -> None:
        seen.append(next(index for index, each in enumerate(windows) if torch.equal(each, window)))
        pass_back(model, book, window)

    monkeypatch.setattr(train_module, "_pass_back", watched)
    one, again = (train(model, book, windows[:2], 3, lambda: None) for _ in range(2))
    assert seen == 2 * [0, 1, 0]
    assert all(map(torch.equal, (*one.k, *one.v), (*again.k, *again.v)))


def test_layers_that_are_recomputed_are_trained_alike(model, book, windows):
    config = AutoConfig.from_pretrained(EMBEDDED)
    assert not resources.training_needs_checkpointing(config, 1024, torch.float32)
    assert resources.training_needs_checkpointing(config, 8192, torch.float32)
    trained = []
    for recomputes in (False, True):
        with checkpointed(model, recomputes):
            trained.append(train(model, book, windows, 2, lambda: None))
    for one, other in zip((*trained[0].k, *trained[0].v), (*trained[1].k, *trained[1].v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-3)


def test_windows_of_training_are_short_and_as_many_as_steps(learned):
    small = {**SMALL, "seq_len": 2048}
    long, short, none = (
        prepare(CalibrationSettings(str(EMBEDDED), PRESETS, [], learned, train_steps=steps, **{**small, **changes}))
        for steps, changes in ((7, {}), (5, {"seq_len": 512}), (0, {}))
    )
    assert long.training.shape == (7, 1024)
    assert short.training.shape == (5, 512)
    assert len(none.training) == 0


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gradients_reach_codes_and_no_anchors(book, share):
    """And rows as if they came back as they are."""
    generator = torch.Generator().manual_seed(0)
    num_kv_heads, num_sub_vectors, _, size = book.k[0].shape
    shape = (1, 300, num_kv_heads, num_sub_vectors * size)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    angles = torch.arange(300)[:, None] * torch.logspace(0, -3, shape[-1] // 2)
    centroids = [table.float().requires_grad_() for table in (book.k[0], book.v[0])]
    method = served_method(book)
    config = method.config.model_copy(update={"anchor_share": share, "anchor_dtype": "model"})
    quantiser = VectorQuantiser(replace(book, k=(centroids[0],), v=(centroids[1],)))
    rows = LayerWindow(0, query, key.requires_grad_(), value, LogitRules(0.1), RotaryTable(angles.cos(), angles.sin()))
    output = attend_window(rows, replace(method, config=config, quantiser=quantiser), None)
    # The last of two closed blocks is seen by the queries of the third alone.
    output[:, 256:].sum().backward()
    reached = [bool(table.grad is not None and table.grad.any()) for table in centroids]
    assert reached == [share == 0, share == 0]
    assert key.grad is not None
    assert bool(key.grad[:, 8:128].any()) == (share == 0)


def test_a_killed_training_goes_on_with_the_next_preset(learned, tmp_path, monkeypatch):
    settings = CalibrationSettings(str(EMBEDDED), PRESETS, [], tmp_path / "killed", train_steps=2, **SMALL)
    trained: list[str] = []

    def killed(model: PreTrainedModel, book: Codebook, *arguments: Any) -> Codebook:
        if trained == PRESETS[:1]:
            trained.append("killed")
            raise KeyboardInterrupt
        trained.append(book.preset.name)
        return train(model, book, *arguments)

    monkeypatch.setattr(write_codebook, "train", killed)
    with pytest.raises(KeyboardInterrupt):
        calibrate(settings)
    (found,) = (path for path in calibrate(settings) if PRESETS[1] in path.name)
    assert trained == [PRESETS[0], "killed", PRESETS[1]]
    (whole, other) = calibrate(replace(settings, out=tmp_path / "whole"))
    assert other.read_bytes() == found.read_bytes()
    assert whole.read_bytes() == codebook_path(tmp_path / "killed", PRESETS[0]).read_bytes()
    header = Codebook.load(whole).header
    assert header.calibration["train_steps"] == 2
    assert "train_steps" not in Codebook.load(codebook_path(learned, PRESETS[0])).header.calibration
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == sorted(
        f"{each}.safetensors" for each in PRESETS
    )


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2"])
def test_any_attention_can_be_trained_through(family, make_model, text_file, tmp_path):
    """With windows, soft caps, sink logits, experts, and without RoPE."""
    model = make_model(family, max_position_embeddings=256)
    small = {"samples": 4, "seq_len": 256, "device": "cpu"}
    books = []
    for steps in (0, 1):
        settings = CalibrationSettings(
            str(model), PRESETS[:1], [str(text_file)], tmp_path / str(steps), train_steps=steps, **small
        )
        books.append(Codebook.load(*calibrate(settings)))
    changed = [not torch.equal(one, other) for one, other in zip(books[0].v, books[1].v, strict=True)]
    assert changed[-1]


def test_windows_that_read_no_codes_are_refused(tmp_path, refused):
    small = {**SMALL, "seq_len": 200}
    with refused(CalibrationError, "--train-steps needs windows of 256 tokens or more, not of 200"):
        calibrate(CalibrationSettings(str(EMBEDDED), PRESETS, [], tmp_path, train_steps=1, **small))
