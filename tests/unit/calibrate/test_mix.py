"""Bits by layer: the choice is the best there is, layers are measured alone, and what does not help is not kept."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_antkv.calibrate import mix, write_codebook
from vllm_antkv.calibrate.run import calibrate
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline import divergences as divergences_module
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.score import score
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS, get_preset

#: 2 bits can be mixed from 4, 2 and 1; tables of 4,096 need more tokens.
PRESET = "antkv-2bit"
SMALL = {"samples": 6, "seq_len": 256, "device": "cpu"}
COSTS = [16, 8, 4, 3, 2]

divergences = st.integers(1, 5).flatmap(
    lambda num_layers: st.lists(
        st.lists(st.floats(0, 10, width=32), min_size=len(COSTS), max_size=len(COSTS)),
        min_size=num_layers,
        max_size=num_layers,
    )
)


@given(divergences=divergences, budget=st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_the_choice_is_the_best_within_the_budget(divergences: list[list[float]], budget: int) -> None:
    num_layers = len(divergences)
    chosen = mix.choose(np.array(divergences), COSTS, num_layers * budget)
    assert sum(COSTS[choice] for choice in chosen) <= num_layers * budget
    best = min(
        sum(row[choice] for row, choice in zip(divergences, choices, strict=True))
        for choices in product(range(len(COSTS)), repeat=num_layers)
        if sum(COSTS[choice] for choice in choices) <= num_layers * budget
    )
    found = sum(row[choice] for row, choice in zip(divergences, chosen, strict=True))
    assert found == pytest.approx(best, rel=1e-5, abs=1e-5 * max(map(max, divergences)))


@pytest.mark.parametrize(
    ("preset", "head_size", "num_tokens", "parts"),
    [
        ("antkv-1bit", 128, 4096, list(PRESETS)),
        ("antkv-1bit", 80, 4096, ["antkv-4bit", "antkv-2bit", "antkv-1bit", "antkv-0.75bit"]),
        ("antkv-1bit", 128, 4095, []),
        ("antkv-2bit", 128, 4095, ["antkv-4bit", "antkv-2bit", "antkv-1bit"]),
        ("antkv-4bit", 128, 4096, []),
        ("antkv-0.375bit", 128, 4096, []),
    ],
)
def test_a_mix_needs_cheaper_and_dearer_presets(preset: str, head_size: int, num_tokens: int, parts) -> None:
    found = mix.parts_of_mix([get_preset(preset)], head_size, num_tokens)
    assert [part.name for part in found] == parts


@pytest.fixture(scope="module")
def long_llama(make_model) -> Path:
    """A model of which only the first layer counts: what the others attend to is scaled down."""

    def edit(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for layer in model.get_decoder().layers[1:]:
                layer.self_attn.o_proj.weight.mul_(0.01)

    return make_model("llama", edit=edit, max_position_embeddings=512, num_hidden_layers=3)


@pytest.fixture(scope="module", autouse=True)
def _hard() -> Iterator[None]:
    """Nothing recent is exact: these models read little else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(divergences_module, "_SERVED", AntKVConfig(recency="none", prefix=0))
        yield


@pytest.fixture(scope="module")
def learned(long_llama: Path, text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("learned")
    both = [PRESET, "antkv-4bit"]
    calibrate(CalibrationSettings(str(long_llama), both, [str(text_file)], out / "mixed", bits="mixed", **SMALL))
    parts = ["antkv-4bit", "antkv-2bit", "antkv-1bit"]
    calibrate(CalibrationSettings(str(long_llama), parts, [str(text_file)], out / "uniform", **SMALL))
    return out


def load(folder: Path, preset: str = PRESET) -> Codebook:
    return Codebook.load(codebook_path(folder, preset))


@pytest.fixture(scope="module")
def books(learned: Path) -> list[Codebook]:
    return [load(learned / "uniform", f"antkv-{bits}bit") for bits in (4, 2, 1)]


@pytest.fixture(scope="module")
def model(long_llama: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(long_llama).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    return torch.randint(3, 300, (2, 256), generator=torch.Generator().manual_seed(3))


def test_bits_go_where_they_are_needed(learned: Path) -> None:
    book = load(learned / "mixed")
    assert book.header.layers == ("antkv-4bit", "antkv-1bit", "antkv-1bit")
    before, after = book.header.calibration["divergence_of_mix"]
    assert after < before
    assert book.header.calibration["bits"] == "mixed"
    # One window of six judges, and the first token of each is left to the prefix.
    assert book.header.calibration["tokens"] == 5 * 255
    assert sorted(path.name for path in (learned / "mixed").iterdir()) == [
        "antkv-2bit.safetensors",
        "antkv-4bit.safetensors",
    ]


def test_a_preset_without_a_dearer_one_stays_as_it_is(learned: Path) -> None:
    book = load(learned / "mixed", "antkv-4bit")
    assert book.header.layers is None
    assert "divergence_of_mix" not in book.header.calibration


def test_a_mixed_codebook_quantises_each_layer_with_its_own_preset(books) -> None:
    mixed = mix._made_of([books[0], books[2], books[2]], books[1])
    assert mixed.header.layers == ("antkv-4bit", "antkv-1bit", "antkv-1bit")
    assert set(mixed.header.k_orders) == {"antkv-4bit", "antkv-1bit"}
    angles = torch.arange(256)[:, None] * torch.logspace(0, -3, 8)
    table = RotaryTable(angles.cos(), angles.sin())
    key, value = torch.randn(2, 1, 256, 2, 16, generator=torch.Generator().manual_seed(0))
    for layer, book in ((0, books[0]), (1, books[2])):
        got = VectorQuantiser(mixed).read_back(layer, key, value, table)
        wanted = VectorQuantiser(book).read_back(layer, key, value, table)
        assert all(map(torch.equal, got, wanted))


def test_layers_are_measured_alone_and_go_on_where_a_run_stopped(books, model, windows) -> None:
    kept: list[dict[str, float]] = []
    found = divergences_module.layer_divergences(
        model, books, windows, {}, lambda values: kept.append(dict(values)), lambda: None
    )
    assert found.shape == (3, 3)
    assert (found[0] > 10 * found[1:]).all(), "the other layers hardly count"
    assert (np.diff(found[0]) > 0).all(), "fewer bits, more divergence"
    assert [len(values) for values in kept] == list(range(1, 10))
    again = divergences_module.layer_divergences(
        model, books, windows, kept[6], lambda values: kept.append(dict(values)), lambda: None
    )
    assert np.array_equal(again, found)
    assert len(kept) == 9 + 2, "two places were left"
    whole = score(
        model, Method("x", 2.0, divergences_module._SERVED, VectorQuantiser(books[1])), windows, against_own=True
    )
    assert whole.fidelity is not None
    assert whole.fidelity.kl == pytest.approx(found[:, 1].sum(), rel=0.1)


def test_a_mix_that_does_not_help_is_not_kept(books, model, windows) -> None:
    by_name = {book.preset.name: book for book in books}
    misleading = np.array([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    mixed = mix.mix(model, get_preset(PRESET), by_name, misleading, windows)
    assert mixed.codebook is by_name[PRESET]
    assert mixed.divergence[0] == mixed.divergence[1]


def test_a_run_stopped_after_measuring_does_not_measure_again(
    long_llama: Path, text_file: Path, learned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [PRESET, "antkv-4bit"]
    settings = CalibrationSettings(str(long_llama), both, [str(text_file)], tmp_path, bits="mixed", **SMALL)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(write_codebook, "mix", stop)
        with pytest.raises(KeyboardInterrupt):
            calibrate(settings)
    measured: list[object] = []
    original = mix.divergence
    for module in (mix, divergences_module):
        monkeypatch.setattr(module, "divergence", lambda *args: measured.append(args) or original(*args))
    (path, _) = calibrate(settings)
    assert len(measured) == 2, "the whole model before and after"
    assert path.read_bytes() == codebook_path(learned / "mixed", PRESET).read_bytes()


def test_a_preset_that_cannot_be_mixed_is_named(long_llama: Path, text_file: Path, tmp_path: Path, caplog) -> None:
    """Tables of 4,096 centroids need more tokens than there are, and 1 bit then has no cheaper preset."""
    (path,) = calibrate(
        CalibrationSettings(str(long_llama), ["antkv-1bit"], [str(text_file)], tmp_path, bits="mixed", **SMALL)
    )
    assert Codebook.load(path).header.layers is None
    assert "antkv-1bit is not mixed" in caplog.text


def test_what_cannot_be_mixed_is_refused_before_any_work(long_llama, text_file, tmp_path: Path) -> None:
    def refuse(model: Path, **settings) -> None:
        settings = {"bits": "mixed", "device": "cpu", **settings}
        calibrate(CalibrationSettings(str(model), [PRESET], [str(text_file)], tmp_path / "out", **settings))

    with pytest.raises(CalibrationError, match=r"--bits mixed.*give more text"):
        refuse(long_llama, samples=1, seq_len=512)
    with pytest.raises(CalibrationError, match=r"--bits mixed.*--seq-len 256 or more"):
        refuse(long_llama, samples=8, seq_len=128)
    with pytest.raises(CalibrationError, match="none of uniform, mixed"):
        refuse(long_llama, bits="some")
    assert not (tmp_path / "out").exists()
