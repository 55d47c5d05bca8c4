"""Bits by layer: the choice is the best there is, and what decides is how far each layer alone moves predictions."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.places import EMBEDDED
from tests.unit.calibrate.test_run import calibrate_small
from vllm_antkv.calibrate import mix, write_codebook
from vllm_antkv.calibrate.capture import checkpointed
from vllm_antkv.calibrate.job import prepare
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.codebook import Codebook, codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline import divergences as divergences_module
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.score import score
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import LAYER_PRESETS, get_preset, nominal_bits

PRESET = "antkv-2bit"
PARTS = ["antkv-4bit", "antkv-2bit", "antkv-1bit", "antkv-0.5bit"]
SMALL = {"samples": 6, "seq_len": 256}
COSTS = [16, 8, 4, 3, 2]

divergences = st.integers(1, 5).flatmap(
    lambda num_layers: st.lists(
        st.lists(st.floats(0, 10, width=32), min_size=len(COSTS), max_size=len(COSTS)),
        min_size=num_layers,
        max_size=num_layers,
    )
)


@given(divergences=divergences, budget=st.integers(2, 16))
@settings(max_examples=60)
def test_the_choice_is_the_best_within_the_budget(divergences, budget):
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


def test_noise_of_one_layer_with_one_preset_is_shared_by_its_others():
    """Factors of layers and of presets stay what they are; half of the noise, in logarithms, goes to all presets."""
    true = np.outer([1.0, 10.0, 3.0], [0.1, 0.4, 1.0, 2.0])
    assert mix.smoothed(true) == pytest.approx(true)
    noisy = true.copy()
    noisy[1, 2] *= 16
    found = mix.smoothed(noisy) / true
    assert found[1] / found[0] == pytest.approx(np.sqrt([2.0, 2.0, 32.0, 2.0]))
    assert np.isfinite(mix.smoothed(np.zeros((2, 3)))).all()


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
def learned(long_llama, text_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("learned")
    calibrate_small(long_llama, text_file, out / "mixed", PRESET, "antkv-4bit", **SMALL)
    calibrate_small(long_llama, text_file, out / "uniform", *PARTS, bits="uniform", **SMALL)
    return out


def load(folder: Path, preset: str = PRESET) -> Codebook:
    return Codebook.load(codebook_path(folder, preset))


@pytest.fixture(scope="module")
def books(learned) -> list[Codebook]:
    return [load(learned / "uniform", name) for name in PARTS]


@pytest.fixture(scope="module")
def model(long_llama) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(long_llama).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def windows(model) -> torch.Tensor:
    """Text that the model draws itself, as the estimate supposes."""
    torch.manual_seed(0)
    drawn = model.generate(torch.ones(4, 1, dtype=torch.int64), do_sample=True, min_length=256, max_length=256)
    assert drawn.shape == (4, 256)
    return drawn


def test_bits_go_where_they_are_needed(learned):
    book = load(learned / "mixed")
    assert book.header.preset == PRESET
    assert book.header.layers[0] == "antkv-4bit"
    assert sum(get_preset(name).nominal_bits for name in book.header.layers) <= 3 * 2
    assert book.header.calibration["bits"] == "mixed"
    assert book.header.calibration["divergence_of_mix"] > 0
    # One window of six judges, and the first token of each is left to the prefix.
    assert book.header.calibration["tokens"] == 5 * 255
    assert sorted(path.name for path in (learned / "mixed").iterdir()) == [
        "antkv-2bit.safetensors",
        "antkv-4bit.safetensors",
    ]


def test_layers_that_count_for_little_get_a_quarter_of_a_bit(text_file, tmp_path):
    (book,) = calibrate_small(EMBEDDED, text_file, tmp_path, "antkv-0.5bit", **SMALL)
    assert {"antkv-1bit", "antkv-0.25bit"} <= set(book.header.layers)
    assert nominal_bits([LAYER_PRESETS[name] for name in book.header.layers]) <= 0.5
    quarter = book.header.layers.index("antkv-0.25bit")
    # (KV heads, sub-vectors, centroids, channels of a sub-vector)
    assert book.k[quarter].shape == book.v[quarter].shape == (2, 2, 256, 32)
    assert [path.name for path in tmp_path.iterdir()] == ["antkv-0.5bit.safetensors"]


def test_a_preset_without_a_dearer_one_stays_as_it_is(learned):
    book = load(learned / "mixed", "antkv-4bit")
    assert book.header.layers is None
    assert "divergence_of_mix" not in book.header.calibration


def test_a_mixed_codebook_quantises_each_layer_with_its_own_preset(books):
    # (layers, parts): the first layer minds a lot.
    mixed = mix.mix(get_preset(PRESET), books, np.array([[0, 9, 9, 9], [0, 0, 0, 0], [0, 0, 0, 0]], float))
    by_name = {book.preset.name: book for book in books}
    assert set(mixed.header.k_orders) == set(mixed.header.layers)
    angles = torch.arange(256)[:, None] * torch.logspace(0, -3, 8)
    table = RotaryTable(angles.cos(), angles.sin())
    key, value = torch.randn(2, 1, 256, 2, 16, generator=torch.Generator().manual_seed(0))
    for layer, name in enumerate(mixed.header.layers):
        got = VectorQuantiser(mixed).read_back(layer, key, value, table)
        wanted = VectorQuantiser(by_name[name]).read_back(layer, key, value, table)
        assert all(map(torch.equal, got, wanted))


def test_where_all_layers_are_alike_the_codebook_has_one_preset(books):
    mixed = mix.mix(get_preset(PRESET), books, np.tile([5.0, 0.0, 5.0, 5.0], (3, 1)))
    assert mixed.header.layers is None
    assert mixed.preset.name == PRESET


@dataclass(frozen=True)
class OneLayer:
    """All other layers keep their rows as they are."""

    quantiser: VectorQuantiser
    layer: int

    def read_back(self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable):
        if layer == self.layer:
            return self.quantiser.read_back(layer, key, value, rotary)
        return key.clone(), value.clone()


def test_what_a_layer_costs_is_close_to_the_divergence_when_it_alone_is_coded(books, model, windows):
    steps: list[None] = []
    found = divergences_module.layer_divergences(model, books, windows, lambda: steps.append(None)).nats
    assert found.shape == (3, 4)
    assert len(steps) == 3 * len(windows)
    assert (found[0] > 10 * found[1:]).all(), "the other layers hardly count"
    assert (np.diff(found[0]) > 0).all(), "fewer bits, more divergence"
    for layer in (1, 2):  # little enough that the second order is all
        method = Method("x", 4.0, divergences_module._SERVED, OneLayer(VectorQuantiser(books[0]), layer))
        fidelity = score(model, method, windows, against_own=True).fidelity
        assert found[layer, 0] == pytest.approx(fidelity.kl, rel=0.5)


@pytest.mark.parametrize("recomputes", [False, True])
def test_costs_do_not_depend_on_whether_layers_are_recomputed(books, model, windows, recomputes):
    with checkpointed(model, recomputes):
        found = divergences_module.layer_divergences(model, books, windows[:1], lambda: None)
    wanted = divergences_module.layer_divergences(model, books, windows[:1], lambda: None)
    assert found.nats == pytest.approx(wanted.nats, rel=1e-4)
    assert found.sizes == pytest.approx(wanted.sizes, abs=1e-3)


def test_a_correction_has_the_size_with_which_its_layer_costs_least(books, model, windows):
    """Keys that are told a tenth of their errors, or ten times as much, get a larger correction, or a smaller one."""

    def measured(factor: float) -> divergences_module.LayerDivergences:
        told = [replace(book, k_errors=factor * book.k_errors) for book in books]
        return divergences_module.layer_divergences(model, told, windows, lambda: None)

    right, little, much, none = map(measured, (1.0, 0.1, 10.0, 0.0))
    assert (right.nats <= none.nats + 1e-12).all()
    # Where a correction changes nothing it stays as it is.
    free = (right.sizes > 0) & (right.sizes < divergences_module._LARGEST) & (right.sizes != 1)
    assert free.any()
    assert (little.sizes[free] > right.sizes[free]).all()
    assert (much.sizes[free] < right.sizes[free]).all()
    assert (none.sizes == 1).all()


def test_a_codebook_has_corrections_of_the_sizes_that_were_measured(long_llama, text_file, tmp_path, monkeypatch):
    measured = []

    def watched(model, books, *args):
        measured.append((books, divergences_module.layer_divergences(model, books, *args)))
        return measured[0][1]

    monkeypatch.setattr(write_codebook, "layer_divergences", watched)
    (mixed,), ((books, found),) = calibrate_small(long_llama, text_file, tmp_path, PRESET, **SMALL), measured
    for layer, preset in enumerate(mixed.header.layer_presets):
        number = [book.preset for book in books].index(preset)
        wanted = books[number].k_errors[layer] * found.sizes[layer, number]
        torch.testing.assert_close(mixed.k_errors[layer], wanted, check_dtype=False)


def test_too_little_text_gives_all_layers_the_preset(long_llama, text_file, tmp_path, capsys):
    (book,) = calibrate_small(long_llama, text_file, tmp_path, PRESET, samples=1, seq_len=512)
    assert book.header.layers is None
    assert "need two windows of 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("samples", "judges"), [(6, 1), (11, 1), (12, 2), (24, 4), (64, 4)])
def test_few_windows_judge_and_all_others_are_learned_from(samples, judges, long_llama, text_file, tmp_path):
    small = {"seq_len": 256, "device": "cpu", "samples": 2}
    job = prepare(CalibrationSettings(str(long_llama), [PRESET], [str(text_file)], tmp_path, **small))
    job = replace(job, windows=torch.arange(samples)[:, None])
    assert job.judging.flatten().tolist() == list(range(judges))
    assert job.learning.flatten().tolist() == list(range(judges, samples))
    alike = replace(job, parts={})
    assert len(alike.judging) == 0
    assert torch.equal(alike.learning, job.windows)
