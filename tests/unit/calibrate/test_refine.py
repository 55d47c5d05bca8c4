"""Training centroids end to end: it lowers the divergence, never makes a codebook worse, and survives a kill."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_antkv.calibrate import refine, training
from vllm_antkv.calibrate.refine import Refined
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.training import Progress, Schedule
from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity
from vllm_antkv.errors import CalibrationError
from vllm_antkv.presets import get_preset

PRESET = get_preset("antkv-1bit")
STEPS = 8
#: Two sub-vectors of eight channels, one for each half of a head.
ORDER = [6, 3, 0, 5, 7, 2, 1, 4, 14, 11, 8, 13, 15, 10, 9, 12]


@pytest.fixture(scope="module")
def long_llama(make_model: Callable[..., Path]) -> Path:
    return make_model("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(long_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(long_llama).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(300, (20, 256), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def codebook(model: PreTrainedModel, windows: torch.Tensor) -> Codebook:
    """Rows of the text itself, disturbed: far from the best that 256 centroids can do."""
    rows: dict[str, list[torch.Tensor]] = {"k_proj": [], "v_proj": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, args, out, name=name: rows[name].append(out)
        )
        for layer in model.model.layers
        for name in rows
    ]
    with torch.no_grad():
        model(windows[:3])
    for hook in hooks:
        hook.remove()
    generator = torch.Generator().manual_seed(1)
    tables = []
    for of_kind in rows.values():
        sub_vectors = torch.stack([rows.flatten(0, 1)[:256].view(256, 2, 2, 8) for rows in of_kind]).permute(
            0, 2, 3, 1, 4
        )
        noise = torch.randn(sub_vectors.shape, generator=generator)
        tables.append((sub_vectors + 0.5 * sub_vectors.std() * noise).half())
    identity = ModelIdentity.from_hf_config(model.config)
    header = CodebookHeader(
        format_version=FORMAT_VERSION,
        preset=PRESET.name,
        model=identity,
        sinks=None,
        k_orders={PRESET.name: ORDER},
        calibration={},
    )
    return Codebook(header, *map(tuple, tables))


def run(
    model: PreTrainedModel,
    codebook: Codebook,
    windows: torch.Tensor,
    progress: Progress | None = None,
    saved: list[Progress] | None = None,
) -> Refined:
    keep = (saved if saved is not None else []).append
    schedule = Schedule(STEPS, 0, progress or Progress(), keep, lambda done: None)
    return refine.refine(model, codebook, windows, schedule)


def test_training_lowers_the_divergence_on_text_it_does_not_see(model, codebook, windows, monkeypatch) -> None:
    monkeypatch.setattr(refine, "_STEP_SIZE", 0.05)
    refined = run(model, codebook, windows)
    before, after = refined.divergence
    assert after < 0.98 * before
    for before, after in zip((*codebook.k, *codebook.v), (*refined.codebook.k, *refined.codebook.v), strict=True):
        assert after.dtype == torch.float16
        assert after.shape == before.shape
        assert not torch.equal(after, before)


def test_the_factors_of_the_logits_correction_are_trained_too(model, codebook, windows, monkeypatch) -> None:
    monkeypatch.setattr(refine, "_STEP_SIZE", 0.05)
    identity = codebook.header.model
    errors = torch.full((identity.num_layers, identity.num_kv_heads, identity.head_size), 0.1)
    refined = run(model, replace(codebook, k_errors=errors), windows).codebook
    assert torch.equal(refined.k_errors, errors)
    assert refined.k_bias_gain.shape == (identity.num_layers, identity.num_attention_heads)
    assert (refined.k_bias_gain != 1).all()


def test_centroids_that_training_does_not_help_are_kept(model, codebook, windows, monkeypatch) -> None:
    monkeypatch.setattr(refine, "_STEP_SIZE", 20.0)
    refined = run(model, codebook, windows)
    assert refined.divergence[0] == refined.divergence[1]
    assert refined.codebook is codebook


def test_a_run_that_was_killed_ends_as_if_it_had_not_been(model, codebook, windows, monkeypatch) -> None:
    monkeypatch.setattr(training, "_STEPS_PER_SAVE", 3)
    saved: list[Progress] = []
    whole = run(model, codebook, windows, saved=saved)
    assert [progress.step for progress in saved] == [3, 6, 8]
    resumed = run(model, codebook, windows, progress=saved[0])
    assert all(map(torch.equal, resumed.codebook.k, whole.codebook.k))
    assert all(map(torch.equal, resumed.codebook.v, whole.codebook.v))
    assert resumed.divergence == whole.divergence


def test_every_window_comes_once_before_any_comes_again() -> None:
    drawn = torch.cat([training._drawn(10, 512, 0, step) for step in range(5)])
    assert sorted(drawn[:10].tolist()) == list(range(10))
    assert sorted(drawn[10:].tolist()) == list(range(10))
    assert drawn[:10].tolist() != drawn[10:].tolist()


def test_calibrate_writes_refined_codebooks_and_says_what_it_gained(
    long_llama: Path, text_file: Path, tmp_path
) -> None:
    small = {"samples": 4, "seq_len": 256, "device": "cpu"}
    plain, refined = (
        Codebook.load(
            calibrate(
                CalibrationSettings(
                    str(long_llama), ["antkv-1bit"], [str(text_file)], tmp_path / str(n), refine=n, **small
                )
            )[0]
        )
        for n in (0, STEPS)
    )
    assert refined.header.calibration["refine"] == STEPS
    before, after = refined.header.calibration["divergence"]
    assert after <= before
    assert all(map(torch.equal, plain.k, refined.k)) == (after == before)
    assert [path.name for path in (tmp_path / str(STEPS)).iterdir()] == ["antkv-1bit.safetensors"]


def test_what_cannot_be_refined_is_refused_before_any_work(long_llama: Path, text_file: Path, tmp_path) -> None:
    def refuse(model: Path, **settings) -> None:
        calibrate(
            CalibrationSettings(
                str(model), ["antkv-1bit"], [str(text_file)], tmp_path / "out", device="cpu", **settings
            )
        )

    with pytest.raises(CalibrationError, match="give more text"):
        refuse(long_llama, refine=1, samples=1, seq_len=512)
    with pytest.raises(CalibrationError, match="--seq-len 256 or more"):
        refuse(long_llama, refine=1, samples=8, seq_len=128)
    with pytest.raises(CalibrationError, match="--refine -1"):
        refuse(long_llama, refine=-1)
    assert not (tmp_path / "out").exists()
