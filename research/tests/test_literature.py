"""The methods of the literature: what they share, and what each adds. One list, the registry's, runs through all."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from research.literature.h2o import HeavyHitters
from research.literature.kvquant import KVQuant, num_outliers
from research.literature.lloyd import lloyd_max, round_to_levels
from research.literature.logquant import LogQuant
from research.literature.method import check_eviction, strongest_so_far
from research.literature.query_moments import channel_pairs, query_moments
from research.literature.registry import ADDITIONS, METHODS, build_method, check_method
from research.literature.request import LiteratureRequest
from research.literature.sample import take_sample
from research.literature.skvq import Skvq
from research.literature.streamingllm import SinksAndWindow
from research.literature.tasq import grouped, learn_tables
from research.literature.turboquant import TurboQuant, normal_levels, rotation
from research.literature.uniform import group_size, per_channel, per_token, round_to_grid
from tests.unit.evaluate.conftest import HEAD_SIZE, LAYERS, tiny_model
from tests.unit.offline.test_attention import MODELS, OTHERS, logits_of, random_windows
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.offline.hidden import loss_of
from vllm_antkv.offline.prompt_scores import RECENT_VOTE, vote_weights
from vllm_antkv.offline.traits import rotary_tables
from vllm_antkv.ops.rope import RotaryTable, rotate, rotated_gradient, unrotate
from vllm_antkv.select.recency import ALWAYS, last_query_table

ENGINE = ("fp16", "cq-", "antkv-")
EVICTING = [name for name in METHODS if name.startswith(("streamingllm-", "h2o-"))]
QUANTISING = [name for name in METHODS if not name.startswith(ENGINE) and name not in EVICTING]
ON_TOP = [f"rtn-2bit+{addition}-3" for addition in ADDITIONS]
LITERATURE = [*QUANTISING, *EVICTING, *ON_TOP]
#: Learn from a calibration text or not at all.
CALIBRATED = ["tasq-1bit"]
KV_HEADS = 2
CHANNELS = KV_HEADS * HEAD_SIZE


@pytest.fixture(scope="module")
def sample(model):
    return take_sample(model, random_windows(2, 300, seed=5), "some text", gradients=True)


@pytest.fixture
def request_for(identity, codebook_folder, sample):
    def make(recency="none", learned=True):
        own = recency == "own"
        config = AntKVConfig() if own else AntKVConfig(recency=recency)
        learned_from = sample if learned else None
        return LiteratureRequest("some/model", identity, codebook_folder, config, "block", own, learned_from)

    return make


@pytest.fixture(scope="module")
def rotary(model) -> RotaryTable:
    return rotary_tables(model, 512)[0]


def random_rows(num_tokens: int = 300, num_windows: int = 2, seed: int = 0) -> torch.Tensor:
    """Channels of very different range, as keys have them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_windows, num_tokens, KV_HEADS, HEAD_SIZE, generator=generator)
    return rows * torch.logspace(-1, 1, CHANNELS)[torch.randperm(CHANNELS, generator=generator)].view(KV_HEADS, -1)


# --- what all of them share ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recency, learned, name",
    [(recency, True, name) for recency in ("none", "own") for name in LITERATURE]
    + [("own", False, name) for name in LITERATURE if name not in CALIBRATED],
)
def test_a_later_token_never_changes_an_earlier_position(recency, learned, name, model, request_for) -> None:
    """At the ends of groups, blocks and residuals, and within them."""
    method = build_method(name, request_for(recency, learned))
    windows = random_windows(1, 300)
    before = logits_of(model, windows, method)
    for position in (5, 127, 161, 290):
        changed = windows.clone()
        changed[0, position:] = random_windows(1, 300, seed=1)[0, position:].roll(1)
        after = logits_of(model, changed, method)
        torch.testing.assert_close(before[:, :position], after[:, :position], rtol=1e-4, atol=1e-4)
    assert (before - after)[:, 290:].abs().max() > 1e-3


@pytest.mark.parametrize("recency", ["none", "own"])
@pytest.mark.parametrize("name", QUANTISING)
def test_a_row_depends_on_rows_that_are_there_when_it_is_first_read(name, recency, request_for, rotary) -> None:
    """However loud what comes later: the first query that reads row j coded comes after the last that sees it exact."""
    method = build_method(name, request_for(recency, learned=name in CALIBRATED))
    rows = [random_rows(), random_rows(seed=1)]
    before = method.quantiser.read_back(0, *rows, rotary)
    checked = 0
    for position in (100, 128, 290):
        loud = [torch.cat((part[:, :position], 50 * part[:, position:]), dim=1) for part in rows]
        after = method.quantiser.read_back(0, *loud, rotary)
        for table, a, b in zip(method.retention.tables(300), before, after, strict=True):
            read = table + 1 < position
            checked += int(read.sum())
            torch.testing.assert_close(a[:, read], b[:, read])
    assert checked > 100


@pytest.mark.parametrize("name", [*QUANTISING, *ON_TOP])
def test_rows_in_full_precision_are_those_of_the_model(name, model, request_for) -> None:
    """Where recency covers the window, no code is ever read."""
    windows = random_windows(1, 200)
    method = build_method(name, request_for("sliding:200" if "logquant" not in name else "log:100"))
    torch.testing.assert_close(logits_of(model, windows, method), logits_of(model, windows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", sorted({name.split("-")[0] for name in QUANTISING}))
def test_the_error_falls_with_bits(family, request_for, rotary) -> None:
    key, value = random_rows(), random_rows(seed=1)
    errors = []
    for name in sorted(name for name in QUANTISING if name.startswith(family + "-")):
        quantiser = build_method(name, request_for(learned=name in CALIBRATED)).quantiser
        coded = quantiser.read_back(0, key, value, rotary)
        assert [rows.shape for rows in coded] == [key.shape, value.shape]
        errors.append([float((a - b).norm()) for a, b in zip(coded, (key, value), strict=True)])
    for fewer, more in pairwise(errors):
        assert more[0] < 0.8 * fewer[0]
        assert more[1] < 0.8 * fewer[1]


@pytest.mark.parametrize("name", QUANTISING)
def test_read_back_leaves_its_input_alone(name, request_for, rotary) -> None:
    key, value = random_rows(), random_rows(seed=1)
    copies = key.clone(), value.clone()
    coded_key, coded_value = build_method(name, request_for()).quantiser.read_back(0, key, value, rotary)
    coded_key.zero_()
    coded_value.zero_()
    assert torch.equal(key, copies[0])
    assert torch.equal(value, copies[1])


@pytest.mark.parametrize("name", LITERATURE)
def test_settings_say_what_was_kept(name, request_for) -> None:
    method = build_method(name, request_for("sliding:16"))
    assert method.name == name
    assert "anchor_share" not in method.settings
    assert method.settings


# --- effective bits, against a count by hand -------------------------------------------------------------------------

CONTEXT = 500
COUNTS = {
    # name, recency: bits of all K elements of a channel of one sequence, and of V
    ("fp8", "none"): (CONTEXT * 8,) * 2,
    ("rtn-2bit", "none"): (CONTEXT * (2 + 32 / 64), CONTEXT * (2 + 32 / 64)),
    ("rtn-4bit", "sliding:1"): ((500 - 116) * (4 + 32 / 64) + 116 * 16,) * 2,  # the open VQ block: 384 to 499
    ("kivi-2bit", "none"): (480 * (2 + 1) + 20 * 16, 500 * (2 + 1)),  # 15 groups of 32
    ("kivi-2bit", "own"): (384 * 3 + 116 * 16, (500 - 127) * 3 + 127 * 16),
    ("turboquant-3bit", "none"): (500 * (3 + 16 / 32), 500 * (3 + 32 / 32)),
    ("kvquant-2bit", "none"): (500 * (2 + 32 / 64), 500 * (2 + 32 / 64 + 32 / 64)),
    ("kvquant-2bit", "own"): (496 * 2.5 + 4 * 16, 496 * 3 + 4 * 16),
    ("skvq-2bit", "own"): ((500 - 36) * (2 + 16 / 64) + 36 * 16,) * 2,  # 5 sinks and 31 beside the token in hand
    # Codes of 10 bits for 8 channels, and a float16 for each token's K.
    ("tasq-1bit", "none"): (500 * (1.25 + 16 / 64), 500 * 1.25),
    ("tasq-1bit", "own"): ((500 - 63) * 1.5 + 63 * 16, (500 - 63) * 1.25 + 63 * 16),
    ("rtn-2bit+pfn-3", "none"): (497 * 2.5 + 3 * 16,) * 2,
    ("rtn-2bit+intactkv-1", "none"): (499 * 2.5 + 16,) * 2,
    # Sinks are exact in the layers after the first.
    ("rtn-2bit+kvsink-3", "none"): (500 * 2.5 + 3 * 13.5 * (LAYERS - 1) / LAYERS,) * 2,
    ("streamingllm-128", "none"): (128 * 16, 128 * 16),
    ("h2o-64", "none"): (64 * 16, 64 * 16),
}


@pytest.mark.parametrize("name, recency", COUNTS)
def test_effective_bits_count_everything_that_is_stored(name, recency, request_for, identity) -> None:
    bits = effective_bits(build_method(name, request_for(recency)), identity, torch.float32, CONTEXT)
    assert bits == pytest.approx(sum(COUNTS[name, recency]) / (2 * CONTEXT))


@pytest.mark.parametrize("name, exact", [("rtn-2bit+pfn-3", (3, 0)), ("skvq-2bit", (36, 31))])
def test_a_layer_with_a_window_counts_what_its_next_query_sees(name, exact, request_for, identity) -> None:
    method = build_method(name, request_for("own"))
    coded = 2 + (32 if name.startswith("rtn") else 16) / 64
    seen = (CONTEXT, 100)
    expected = sum(16 * few + coded * (tokens - few) for few, tokens in zip(exact, seen, strict=True)) / sum(seen)
    assert effective_bits(method, identity, torch.float32, CONTEXT, [None, 100]) == pytest.approx(expected)
    assert effective_bits(method, identity, torch.float32, 100, [None, 4096]) == pytest.approx(
        effective_bits(method, identity, torch.float32, 100)
    )


def test_logquant_counts_the_tokens_it_holds(request_for, identity) -> None:
    held = int((LogQuant(2, 42).last_query(CONTEXT) >= CONTEXT).sum())
    assert 84 <= held <= 126
    expected = (held * 16 + (CONTEXT - held) * ((2 + 32 / 42) + 3) / 2) / CONTEXT
    method = build_method("logquant-2bit", request_for())
    assert effective_bits(method, identity, torch.float32, CONTEXT) == pytest.approx(expected)


def test_what_is_learned_from_the_window_is_stored_with_it(request_for, identity) -> None:
    def bits(name: str, learned: bool) -> float:
        return effective_bits(build_method(name, request_for(learned=learned)), identity, torch.float32, CONTEXT)

    levels = 16 * 4 / (CONTEXT * CHANNELS)
    assert bits("kvquant-2bit", False) - bits("kvquant-2bit", True) == pytest.approx(32 / CONTEXT / 2 + levels)
    order_and_clips = (16 + 16 / 64) / CONTEXT
    assert bits("skvq-2bit", False) - bits("skvq-2bit", True) == pytest.approx(order_and_clips)


# --- the scalar quantisers -------------------------------------------------------------------------------------------


def test_round_to_grid_hits_both_ends_and_no_more_than_its_levels() -> None:
    rows = torch.randn(10, 64)
    coded = round_to_grid(rows, 2)
    assert all(len(row.unique()) <= 4 for row in coded)
    torch.testing.assert_close(coded.amin(-1), rows.amin(-1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(coded.amax(-1), rows.amax(-1), rtol=1e-3, atol=5e-3)
    step = (rows.amax(-1) - rows.amin(-1)) / 3
    assert ((coded - rows).abs().amax(-1) <= 0.51 * step).all()


def test_round_to_grid_survives_equal_and_huge_values() -> None:
    torch.testing.assert_close(round_to_grid(torch.full((3, 8), 0.5), 2), torch.full((3, 8), 0.5))
    assert round_to_grid(torch.tensor([[-1e6, 0.0, 1e6]]), 4).isfinite().all()
    assert round_to_grid(torch.tensor([[-1e6, 0.0, 1e6]]), 4, parameters=torch.float8_e4m3fn).isfinite().all()


def test_groups_do_not_touch_each_other() -> None:
    rows = random_rows(96)
    loud = rows.clone()
    loud[:, 40, 1, 3] = 1000
    changed = per_channel(rows, 2, 32) != per_channel(loud, 2, 32)
    assert changed.any(dim=0).nonzero()[:, 0].unique().tolist() == list(range(32, 64))
    assert changed[..., 1, 3].any()
    assert not changed[..., 0, :].any()
    changed = per_token(rows, 2, 32) != per_token(loud, 2, 32)
    assert changed.any(dim=0).nonzero()[:, 0].unique().tolist() == [40]
    assert not changed[..., 0, :].any()


def test_group_sizes_divide() -> None:
    assert [group_size(channels, 128) for channels in (1024, 64, 192)] == [128, 64, 96]


def test_lloyd_max_is_max_s_table() -> None:
    """J. Max, Quantizing for minimum distortion, 1960, table I."""
    expected = {1: [0.7980], 2: [0.4528, 1.510], 3: [0.2451, 0.7560, 1.344, 2.152]}
    for bits, levels in expected.items():
        torch.testing.assert_close(
            normal_levels(bits)[0, 2 ** (bits - 1) :], torch.tensor(levels, dtype=torch.float64), atol=2e-3, rtol=0
        )


def test_lloyd_max_solves_every_sample_on_its_own() -> None:
    values = torch.cat((torch.tensor([0.0, 0.1, 5.0, 5.1] * 10)[None], torch.linspace(0, 1, 40)[None]))
    levels = lloyd_max(values, 1)
    torch.testing.assert_close(levels[0], torch.tensor([0.05, 5.05]))
    torch.testing.assert_close(levels[1], torch.tensor([0.25, 0.75]), atol=0.02, rtol=0)
    torch.testing.assert_close(round_to_levels(values[:1], levels[:1])[0, :4], torch.tensor([0.05, 0.05, 5.05, 5.05]))


# --- each method's own idea ------------------------------------------------------------------------------------------


def test_kivi_serves_channels_that_are_large_better_than_rtn(request_for, rotary) -> None:
    """KIVI, table 1: keys with outlier channels want scales per channel."""
    key = random_rows()
    error = {}
    for name in ("rtn-2bit", "kivi-2bit"):
        coded, _ = build_method(name, request_for()).quantiser.read_back(0, key, key, rotary)
        error[name] = float((coded - key)[:, :288].norm())
    assert error["kivi-2bit"] < 0.8 * error["rtn-2bit"]


def test_turboquant_keeps_norms_and_does_not_mind_a_loud_channel(rotary) -> None:
    key = random_rows()
    coded, _ = TurboQuant(2).read_back(0, key, key, rotary)
    torch.testing.assert_close(coded.norm(dim=-1), key.norm(dim=-1), rtol=1e-3, atol=1e-3)
    # The distortion of the paper's theorem 1 at 2 bits, 0.117 of the norm squared, whatever the row looks like.
    loud = torch.zeros_like(key)
    loud[..., 3] = 7.0
    for rows in (key, loud):
        error = (TurboQuant(2).read_back(0, rows, rows, rotary)[0] - rows).square().sum(-1) / rows.square().sum(-1)
        assert error.mean() < 0.15
    torch.testing.assert_close(rotation(64) @ rotation(64).T, torch.eye(64, dtype=torch.float64))


def test_kvquant_keeps_outliers_exactly(rotary) -> None:
    key, value = random_rows(), random_rows(seed=1)
    key[:, 200, 0, 0] = 500.0
    value[:, 201, 1, 5] = -800.0
    coded_key, coded_value = KVQuant(2, None).read_back(0, key, value, rotary)
    assert (coded_value[:, 201, 1, 5] == -800.0).all()
    assert ((coded_value == value).flatten(2).sum(-1) >= num_outliers(CHANNELS)).all()
    # Before RoPE it is spread over a pair of channels, one of which has the slot.
    assert (coded_key - key)[:, 200].norm() < 0.8 * key[:, 200].norm()
    assert num_outliers(1024) == 10


def test_kvquant_works_before_rope(sample, rotary) -> None:
    """Channels that are constant before RoPE cost nothing, although they turn after it."""
    rotary = RotaryTable(rotary.cos[:300], rotary.sin[:300])
    key = torch.ones(1, 300, KV_HEADS, HEAD_SIZE) * torch.randn(KV_HEADS, HEAD_SIZE)
    turned = rotate(key, torch.arange(300), rotary)
    coded, _ = KVQuant(1, None).read_back(0, turned, random_rows(num_windows=1), rotary)
    torch.testing.assert_close(coded, turned, rtol=1e-3, atol=1e-3)


def test_skvq_reorders_and_clips(rotary) -> None:
    """Sorting quiet and loud channels pays, for K before RoPE turns them into one another; so does clipping."""
    generator = torch.Generator().manual_seed(3)
    positions = torch.arange(200)
    rows = torch.randn(1, 200, 4, HEAD_SIZE, generator=generator)
    quiet = slice(HEAD_SIZE // 2, None)
    rows[..., : HEAD_SIZE // 2] *= 50
    coded_key, coded_value = Skvq(2, None).read_back(0, rotate(rows, positions, rotary), rows, rotary)
    plain = per_token(rows, 2, 64)
    for coded in (unrotate(coded_key, positions, rotary), coded_value):
        assert (coded - rows)[..., quiet].norm() < 0.1 * (plain - rows)[..., quiet].norm()
    tailed = torch.distributions.StudentT(3).sample((1, 200, KV_HEADS, HEAD_SIZE))
    coded, _ = Skvq(2, None).read_back(0, tailed, tailed, rotary)
    assert (coded - tailed).norm() < (per_token(tailed, 2, 64) - tailed).norm()


def test_tasq_forgets_how_loud_a_token_is(request_for, rotary) -> None:
    """One scale for all heads of a token: the code, and the error for its size, stay."""
    key = random_rows()
    quantiser = build_method("tasq-1bit", request_for()).quantiser
    coded, loud = (quantiser.read_back(0, size * key, key, rotary)[0] for size in (1, 100))
    torch.testing.assert_close(loud, 100 * coded, rtol=2e-3, atol=1e-2)


def test_tasq_codes_what_queries_look_at(sample, request_for, rotary) -> None:
    """The error that queries see is smaller than with channels that count alike."""
    generator = torch.Generator().manual_seed(0)
    known, rows = torch.randn(2, 8, 500, KV_HEADS, HEAD_SIZE, generator=generator)
    moments = torch.logspace(-2, 2, HEAD_SIZE)[torch.randperm(HEAD_SIZE, generator=generator)].repeat(KV_HEADS, 1)
    alike = [torch.ones_like(known)]
    text = replace(sample, plain_key=[known], value=[known], key_fisher=alike, value_fisher=alike)
    positions = torch.arange(500)
    key, error = rotate(rows, positions, rotary), []
    for weights in (torch.ones_like(moments), moments):
        request = replace(request_for(), sample=replace(text, query_moments=[weights]))
        coded, _ = build_method("tasq-1bit", request).quantiser.read_back(0, key, key, rotary)
        error.append(float(((unrotate(coded, positions, rotary) - rows).square() * moments).sum()))
    assert error[1] < 0.6 * error[0]


def test_tasq_groups_channels_that_move_together() -> None:
    """Eight causes of four pairs each, whose pairs come far apart."""
    generator = torch.Generator().manual_seed(0)
    pairs = [[first, first + 32] for first in range(32)]
    causes = torch.randn(4000, 8, generator=generator).repeat(1, 8)
    rows = causes + 0.3 * torch.randn(4000, 64, generator=generator)
    order = grouped(torch.cov(rows.double().T), pairs)
    assert sorted(order) == list(range(64))
    for group in torch.tensor(order).view(8, 8):
        assert len((group % 8).unique()) == 1
        assert {int(channel) + 32 for channel in group if channel < 32} == {int(c) for c in group if c >= 32}


def test_tasq_keeps_rope_pairs_together(sample, rotary) -> None:
    tables = learn_tables(sample, 0, rotary, torch.empty(0))
    assert (tables.weights.square().mean(-1) - 1).abs().max() < 1e-5
    for order in tables.order:
        groups = {frozenset(group) for group in order.view(-1, 8).tolist()}
        for first, second in channel_pairs(rotary, HEAD_SIZE):
            assert any({first, second} <= group for group in groups)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("neox, rotary_dim", [(True, 8), (False, 8), (True, 4)])
def test_query_moments_are_those_of_queries_turned_back_by_each_key(window, neox, rotary_dim) -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.arange(7)[:, None] * torch.rand(rotary_dim // 2, generator=generator)
    table = RotaryTable(1.5 * angles.cos(), 1.5 * angles.sin(), neox)
    query = torch.randn(7, 4, 8, generator=generator)
    seen = []
    for position in range(7):
        queries = query[position : position + (window or 7)]
        turned = rotated_gradient(queries, torch.full((len(queries),), position), table)
        seen.append(turned.square().unflatten(1, (2, 2)).mean(2))
    torch.testing.assert_close(query_moments(query, 2, table, window), torch.cat(seen).mean(0))


def test_logquant_holds_what_the_engine_s_recency_would_hold() -> None:
    """The table of `select.recency`, which also has the open VQ block, where that says nothing more."""
    own, engine = LogQuant(2, 4).last_query(600), last_query_table(AntKVConfig(recency="log:4", prefix=0), 600).long()
    beyond_block = own > torch.arange(600) // 128 * 128 + 127
    assert beyond_block.any()
    assert torch.equal(own[beyond_block], engine[beyond_block])
    assert (own <= engine).all()


def test_logquant_groups_go_together_and_hold_w_tokens() -> None:
    table = LogQuant(2, 42).last_query(500)
    groups, counts = table[table < ALWAYS].unique(return_counts=True)
    assert (counts == 42).all()
    assert (groups[0], groups[1]) == (125, 125 + 42)
    for query in range(126, 500):
        assert 84 < int(((table >= query) & (torch.arange(500) <= query)).sum()) <= 126


def test_sinks_are_the_strongest_so_far() -> None:
    magnitude = torch.tensor([[5.0, 1.0, 7.0, 5.0, 0.0, 9.0, 2.0]])
    until = strongest_so_far(magnitude, 2)[0]
    for query in range(7):
        expected = sorted(range(query + 1), key=lambda j: (-magnitude[0, j], j))[:2]
        assert {j for j in range(query + 1) if until[j] >= query} == set(expected)


def test_what_is_laid_on_top_is_exact_for_good(model, request_for) -> None:
    """With all of a window's tokens named, nothing of it is lost."""
    windows = random_windows(1, 150)
    exact = logits_of(model, windows)
    for name in ("rtn-2bit+pfn-150", "rtn-2bit+intactkv-150", "rtn-2bit+kvsink-2+pfn-150"):
        method = build_method(name, request_for())
        torch.testing.assert_close(logits_of(model, windows, method), exact, rtol=1e-3, atol=1e-3)
    sinks = build_method("rtn-2bit+kvsink-150", request_for())
    plain = build_method("rtn-2bit", request_for())
    assert sinks.sinks.layer == 0
    closer = [(logits_of(model, windows, method) - exact).norm() for method in (sinks, plain)]
    assert 1e-3 < closer[0] < closer[1], "the first layer has codes still"


def test_streamingllm_sees_the_first_and_the_last() -> None:
    key = torch.zeros(1, 20, 1, 4)
    seen = SinksAndWindow(8).visible(key, key, 1.0)[0, 0]
    assert seen[19].nonzero().flatten().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert (seen.sum(-1) == torch.arange(1, 21).clamp(max=8)).all()


def test_h2o_keeps_what_is_attended_to() -> None:
    """Token 6 has everyone's attention and stays; the others go once they are no longer recent."""
    key = torch.zeros(1, 40, 1, 4)
    query = torch.ones(1, 40, 2, 4)
    key[0, 6] = 5.0
    seen = HeavyHitters(8).visible(query, key, 1.0)[0, 0]
    assert seen[6:, 6].all()
    assert not seen.triu(1).any()
    assert (seen.sum(-1) == torch.arange(1, 41).clamp(max=9)).all(), "8 as the predecessor left them, and its own"
    for token in range(8, 40):
        assert seen[token, token - 4 : token + 1].all(), "the recent half stays"


# --- the sample, and what is refused ---------------------------------------------------------------------------------


def test_a_sample_holds_the_rows_of_the_text(model, sample) -> None:
    assert len(sample.plain_key) == len(sample.value) == LAYERS
    assert sample.plain_key[0].shape == (2, 300, KV_HEADS, HEAD_SIZE)
    assert 0 <= sample.sink_layer < LAYERS
    values = []
    hook = model.get_decoder().layers[1].self_attn.v_proj.register_forward_hook(lambda m, a, out: values.append(out))
    logits_of(model, random_windows(2, 300, seed=5))
    hook.remove()
    torch.testing.assert_close(sample.value[1], values[0].view(2, 300, KV_HEADS, HEAD_SIZE), rtol=1e-3, atol=1e-4)


def test_a_sample_holds_the_squared_gradients_of_the_loss(model, sample) -> None:
    """By a difference: K and V are changed before RoPE, where the loss minds most."""
    window = random_windows(2, 300, seed=5)[1]
    attention = model.get_decoder().layers[1].self_attn
    for projection, fisher in ((attention.k_proj, sample.key_fisher), (attention.v_proj, sample.value_fisher)):
        assert fisher[1].shape == (2, 300, KV_HEADS, HEAD_SIZE)
        largest, where = fisher[1][1].flatten().float().max(0)
        losses = []
        for step in (-1e-2, 1e-2):

            def change(module, args, output, step=step, where=where):
                moved = output.clone()
                moved.flatten()[where] += step
                return moved

            hook = projection.register_forward_hook(change)
            with torch.no_grad():
                losses.append(float(loss_of(model, window)))
            hook.remove()
        assert ((losses[1] - losses[0]) / 2e-2) ** 2 == pytest.approx(float(largest), rel=0.05)
    assert not take_sample(model, window[None], "text").key_fisher


def test_calibrated_methods_learn_from_the_sample(request_for, rotary) -> None:
    """A row comes back the same whatever window it is in."""
    key, value = random_rows(), random_rows(seed=1)
    for name in ("kvquant-2bit", "skvq-2bit", "tasq-1bit"):
        learned = build_method(name, request_for())
        alone = learned.quantiser.read_back(0, key[:1], value[:1], rotary)
        together = learned.quantiser.read_back(0, key, value, rotary)
        for a, b in zip(alone, together, strict=True):
            torch.testing.assert_close(a[0], b[0])
        assert learned.settings["learned_from"] == "some text"
        assert learned.retention.learn == 0
        if name not in CALIBRATED:
            assert build_method(name, request_for(learned=False)).retention.learn == 128


def test_tasq_without_a_text_says_what_to_do(model, request_for, refused) -> None:
    without_gradients = take_sample(model, random_windows(1, 300), "text", max_tokens=1)
    for sample in (None, without_gradients):
        with refused(SettingsError, "--calibration"):
            build_method("tasq-1bit", replace(request_for(), sample=sample))


def test_kvsink_without_a_rule_says_what_to_do(request_for, tmp_path, refused) -> None:
    with refused(SettingsError, "--calibration"):
        build_method("rtn-2bit+kvsink-5", replace(request_for(learned=False), codebooks=tmp_path))
    assert build_method("rtn-2bit+kvsink-5", replace(request_for(), codebooks=tmp_path)).sinks is not None


# --- AnTKV's own choice of anchors ----------------------------------------------------------------------------------


def test_all_queries_look_ahead(model, request_for) -> None:
    """Why the server's do not: with anchors chosen by the whole window, the future reaches the past."""
    request = request_for("sliding:1")
    config = AntKVConfig(anchor_share=0.1, recency="sliding:1", sinks=False, prefix=0)
    method = build_method("antkv-1bit", replace(request, config=config, anchor_scope="prompt"))
    assert method.settings["anchor_scope"] == "prompt"
    windows = random_windows(1, 384)
    changed = windows.clone()
    changed[0, 256:] = random_windows(1, 384, seed=9)[0, 256:]
    before, after = logits_of(model, windows, method), logits_of(model, changed, method)
    assert (before - after)[:, 128:256].abs().max() > 1e-3
    torch.testing.assert_close(before[:, :128], after[:, :128], rtol=1e-4, atol=1e-4)


def test_votes_on_rows_that_are_seen_exactly_count_little() -> None:
    last_query, keys, queries = torch.tensor([0, 2, 2, 3]), torch.arange(4), torch.arange(4)[:, None]
    some = RECENT_VOTE
    expected = [[some, 0, 0, 0], [1, some, 0, 0], [1, some, some, 0], [1, 1, 1, some]]
    assert vote_weights(queries, keys, last_query).tolist() == expected


# --- the registry ----------------------------------------------------------------------------------------------------


def test_every_row_of_the_design_is_there() -> None:
    literature = {"fp8", "rtn", "kivi", "skvq", "kvquant", "turboquant", "logquant", "tasq", "streamingllm", "h2o"}
    assert {name.split("-")[0] for name in METHODS} == {"fp16", "cq", "antkv", *literature}
    assert set(ADDITIONS) == {"pfn", "kvsink", "intactkv"}


def test_the_docs_name_every_method() -> None:
    page = (Path(__file__).parents[2] / "docs" / "research" / "methods.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    for name in METHODS:
        family, _, size = name.partition("-")
        every = f"`{family}-*`"
        assert any(f"`{name}`" in row or every in row or (f"`{family}-" in row and f"`-{size}`" in row) for row in rows)
    assert all(f"`+{name}-N`" in page for name in ADDITIONS)


@pytest.mark.parametrize("name", [*QUANTISING, *EVICTING])
def test_every_method_has_the_bits_of_its_name(name, request_for) -> None:
    codes = {"fp8": 8, "tasq-1bit": 1.25}
    bits = codes[name] if name in codes else int(name[-4]) if name.endswith("bit") else 16
    assert build_method(name, request_for()).nominal_bits == bits


def test_intactkv_takes_its_own_prefix(request_for) -> None:
    method = build_method("antkv-1bit+intactkv-9", request_for())
    assert method.config == AntKVConfig(prefix=9, recency="none")
    assert method.name == "antkv-1bit+intactkv-9"
    for name in ("antkv-1bit+pfn-5", "cq-1bit+intactkv-5", "fp16+intactkv-5"):
        with pytest.raises(SettingsError, match="Nothing can be laid on top"):
            build_method(name, request_for())


@pytest.mark.parametrize("name", ["rtn-99bit", "antkv-1bit+", "rtn-2bit+pfn--5", "rtn-2bit+pfn-" + "9" * 30])
def test_unknown_names_are_refused(name, refused) -> None:
    with refused(SettingsError, "Unknown"):
        check_method(name)


@pytest.mark.parametrize("name", ["windows", "gemma2", "gpt-oss"])
def test_eviction_by_plain_attention_is_refused_where_attention_is_not_plain(name, refused, request_for) -> None:
    family, changes = (MODELS | OTHERS)[name]
    with refused(UnsupportedModelError, "h2o-64 evicts by plain attention"):
        check_eviction(tiny_model(family, **changes), build_method("h2o-64", request_for()), 100)
