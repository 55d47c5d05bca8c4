"""The Triton kernels against the evaluator in float64 and the reference operations; run by test_triton.py.

Pages are full of NaN before they are written, and freed pages are again (see engine.py).
"""

import os
from dataclasses import replace
from functools import partial

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1: test_triton.py runs it", allow_module_level=True)

import numpy as np
import torch
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.anchor_bytes import assert_reads_every_byte, assert_stores_what_the_reference_stores
from tests.kernels.as_reference import assert_as_reference
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.guarded import guarded
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from tests.kernels.quick_interpreter import quicken
from tests.kernels.test_drafts import AT_THE_EDGE, DRAFT_CONFIGS, EDGE, answer_in, draw_request
from tests.kernels.triton_cases import (
    CONFIGS,
    DRAWN_CONFIGS,
    ONE_HEAD,
    SHAPES,
    assert_offline,
    assert_pages_are_those_of_the_reference,
    serve,
    serve_drafts,
)
from tests.kernels.varlen_reference import planned, varlen
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import triton as triton_operations
from vllm_antkv.ops import varlen as varlen_operations
from vllm_antkv.ops import warm_up
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.triton import TritonOperations
from vllm_antkv.ops.varlen import Attended
from vllm_antkv.triton_kernels import encode_store
from vllm_antkv.triton_kernels.arguments import Layer

quicken(encode_store.store_codes.fn)


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch) -> None:
    """The interpreter pays for programs and iterations, not for elements."""
    monkeypatch.setattr(encode_store, "_MANY_TOKENS", 32)
    monkeypatch.setattr(encode_store, "_BLOCK_C", 1024)


@pytest.fixture(autouse=True)
def guarded_tables(monkeypatch) -> None:
    """The operations make tables of their own; pages are guarded where they are made."""
    make = triton_operations._handed
    fields = Layer._fields[Layer._fields.index("k_centroids") :]

    def handed(layer):
        made = make(layer)
        return made._replace(**{name: guarded(getattr(made, name)) for name in fields})

    monkeypatch.setattr(triton_operations, "_handed", handed)


@pytest.fixture(autouse=True)
def products_of_bfloat16(monkeypatch) -> None:
    """Triton's interpreter (3.6 to 3.9) multiplies the bits of bfloat16 as if they were integers."""
    multiply = InterpreterBuilder.create_dot

    def widened(handle: TensorHandle) -> TensorHandle:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return multiply(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    "shape",
    SHAPES,
    ids=lambda shape: f"{shape.preset}, {shape.head_size} channels, {shape.num_heads} heads, {shape.dtype}",
)
def test_layers(shape):
    """Without a prefix, so that the last steps see a tile through codes alone."""
    engine = Engine(AntKVConfig(recency="sliding:8", prefix=0), shape, TritonOperations)
    assert_offline(engine, serve(engine))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.anchor_share} {config.recency}")
def test_settings(config):
    engine = Engine(config, ONE_HEAD, TritonOperations)
    assert_offline(engine, serve(engine, [(130, 5), (1, 1), (1, 128)]))


@settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    config=DRAWN_CONFIGS,
    shape=st.sampled_from([ONE_HEAD, Shape(num_heads=2, error=1.0), Shape("antkv-4bit", 8, 4, 1, neox=False)]),
    lengths=st.lists(st.integers(1, 260), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_schedule(config, shape, lengths, data):
    engine = Engine(config, shape, TritonOperations)
    sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate(lengths)]
    engine.run(sequences, lambda left: data.draw(st.sampled_from([0, 1, 127, 128, 200])))
    assert_offline(engine, sequences)


@pytest.mark.parametrize("config", DRAFT_CONFIGS, ids=str)
@pytest.mark.parametrize("rules", [{}, {"window": 40, "has_sinks": True, "error": 1.0}], ids=str)
def test_a_block_that_rejected_tokens_filled_closes_again(config, rules):
    shape = Shape(num_heads=3, num_kv_heads=1, **rules)
    engine, sequence = Engine(config, shape, TritonOperations, num_drafts=3), draw_request(shape, EDGE)
    answer_in(engine, sequence, AT_THE_EDGE)
    assert_offline(engine, [sequence])


@pytest.mark.parametrize("window", [None, 321])
def test_drafts_over_splits(window):
    """Queries of two blocks see anchors of several chunks of blocks; windows of some of them begin with a tile."""
    shape = Shape(num_heads=2, num_kv_heads=1, max_len=1300, error=1.0, window=window)
    engine, sequence = Engine(AntKVConfig(), shape, Decoding, num_drafts=3), draw_request(shape, (1150, 6))
    answer_in(engine, sequence, [(4, 3), (4, 1), (2, 0)])
    assert_offline(engine, [sequence])


def test_drafts_see_the_tokens_of_their_step_as_later_ones_do():
    """As single tokens would, where chunks of prompts see theirs exactly."""
    config = AntKVConfig(recency="none", prefix=0, prefill_reads_cache=False)
    outputs = []
    for build in (TritonOperations, ReferenceOperations):
        engine, sequence = Engine(config, ONE_HEAD, build, num_drafts=3), draw_request(ONE_HEAD, (126, 6))
        answer_in(engine, sequence, [(4, 0), (2, 0)])
        outputs.append(sequence.output)
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-4)


def test_warming_up_counts_nothing_and_leaves_nothing_that_anybody_sees(monkeypatch):
    monkeypatch.setattr(warm_up, "_PROMPT", 140)
    monkeypatch.setattr(warm_up, "_BATCH", 3)
    engine = Engine(AntKVConfig(recency="sliding:8", prefix=2), ONE_HEAD, TritonOperations)
    warm_up.warm_up(TritonOperations, engine.state)
    assert (engine.raw != 0xFF).any()
    assert engine.state.counters.report()["anchors_chosen"] == 0
    assert_offline(engine, serve(engine))


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_decoding_is_launched_for_single_tokens_and_drafts_alone(monkeypatch, num_drafts):
    launched = []
    monkeypatch.setattr(triton_operations, "decode", lambda *arguments: launched.append(arguments))
    engine = Engine(AntKVConfig(), ONE_HEAD, TritonOperations, num_drafts=num_drafts)
    first, second = (draw_sequence(seed, 30, ONE_HEAD) for seed in range(2))
    for step, expected in (([(first, 9)], 0), ([(first, 1 + num_drafts), (second, 9)], 1), ([(first, 1)], 2)):
        engine.step(step)
        assert len(launched) == expected


def test_warming_up_has_block_tables_as_wide_as_in_serving(monkeypatch):
    """Triton specialises on whether a stride is a multiple of 16: another one would compile in somebody's request."""
    widths = set()

    def recorded(rows, layer, batch, shape):
        widths.add((batch.argument.vq_table_stride, batch.argument.recency_table_stride))

    for name in ("encode_store", "anchor_score", "prefill", "decode"):
        monkeypatch.setattr(triton_operations, name, recorded if name == "encode_store" else lambda *rest: None)
    engine = Engine(AntKVConfig(), replace(ONE_HEAD, max_len=2100), TritonOperations)
    warm_up.warm_up(TritonOperations, engine.state)
    assert widths == {(17, -(-2100 // engine.layout.recency_block_size))}


@pytest.mark.parametrize("max_len", [400, 36])
def test_warming_up_takes_no_more_tokens_than_a_step_may_have(monkeypatch, max_len):
    """Prompts of the longest request, or several where it is short."""
    taken = []

    def recorded(rows, layer, batch, shape):
        taken.append(int(batch.argument.query_start_loc[-1]))
        encode_store.encode_store(rows, layer, batch, shape)

    monkeypatch.setattr(warm_up, "_BATCH", 3)
    monkeypatch.setattr(triton_operations, "encode_store", recorded)
    shape = Shape(num_heads=3, num_kv_heads=1, max_len=max_len)
    config = AntKVConfig(recency="sliding:8", prefill_reads_cache=False)
    engine = Engine(config, shape, through_a_varlen_kernel)
    # Pages of both kinds lie in the same blocks here, so that what it would attend to means nothing.
    kernel = replace(varlen(100), attend=lambda query, *rest: query.new_zeros(query.shape[1::-1], dtype=torch.float32))
    layer = replace(engine.state, varlen=kernel, max_num_reqs=8)
    warm_up.warm_up(TritonOperations, layer)
    assert max(taken) == (100 if max_len == 400 else 2 * (max_len - 1))


def test_centroids_on_a_gpu_are_there_once(monkeypatch):
    """A layer on a GPU has them in float16 (`load.attach`)."""
    # Without the copies of the other tests.
    monkeypatch.undo()
    engine = Engine(AntKVConfig(), ONE_HEAD, TritonOperations, compute_dtype=torch.float16)
    tables = engine.operations._handed.argument
    for name in ("k_centroids", "v_centroids"):
        assert getattr(tables, name).data_ptr() == getattr(engine.state, name).data_ptr()
    assert tables.k_half_norms is engine.state.half_norms[0]


@pytest.mark.parametrize(("recency", "is_varlen"), [("sliding:32", False), ("none", False), ("sliding:32", True)])
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(recency, is_varlen):
    build = through_a_varlen_kernel if is_varlen else TritonOperations
    assert_missing_rows_are_zeros(build, ONE_HEAD, recency, reads_cache=not is_varlen)


class Decoding(ReferenceOperations):
    """The Triton kernels decode; longer queries are the reference's, which takes less time."""

    def __init__(self, layer: LayerState) -> None:
        super().__init__(layer)
        self._triton = TritonOperations(layer)

    def attend(self, rows, output, step):
        operations = self._triton if step.max_query_len <= self._layer.recency.score_slots else super()
        operations.attend(rows, output, step)


class Voting(ReferenceOperations):
    """Votes of single tokens come from elsewhere: here, from nowhere; scores in the pages are drawn at random."""

    def __init__(self, layer: LayerState, beside: TritonOperations | ReferenceOperations) -> None:
        super().__init__(layer)
        self._beside = beside

    def anchor_score(self, rows, step):
        scores = self._layer.recency.scores
        scores.copy_(torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)))
        self._beside.anchor_score(rows, step, singles=False)
        self._beside.close_blocks(rows, step)


def test_blocks_that_single_tokens_fill_are_closed_by_the_scores_in_their_pages():
    """Beside others that stay open, and longer requests, which vote."""
    states = []
    for kind in (TritonOperations, ReferenceOperations):
        shape = replace(ONE_HEAD, dtype=torch.float32)
        engine = Engine(AntKVConfig(anchor_share=0.05, prefix=1), shape, lambda layer: Voting(layer, kind(layer)))  # noqa: B023
        serve(engine, [(127, 50, 100), (1, 1, 40)])
        states.append(engine.state)
    ours, reference = states
    assert torch.equal(ours.vq.anchor_offsets, reference.vq.anchor_offsets)
    assert (ours.vq.anchor_offsets >= 0).any()
    torch.testing.assert_close(ours.recency.scores, reference.recency.scores, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    ("num_splits", "share", "anchor_dtype", "error"), [(1, 0.015, "fp8", 0), (4, 0.0, "fp8", 0), (4, 0.2, "model", 1.0)]
)
def test_a_long_past(monkeypatch, share, anchor_dtype, num_splits, error):
    """Anchors of several chunks of blocks, of which the last is not full, and no anchor rows, and many."""
    monkeypatch.setattr(triton_operations, "_MAX_SPLITS", num_splits)
    shape = replace(ONE_HEAD, max_len=1500, error=error)
    engine = Engine(AntKVConfig(anchor_share=share, anchor_dtype=anchor_dtype, sinks=share > 0), shape, Decoding)
    assert_offline(engine, serve(engine, [(1330, 700), (1, 1), (1, 1)]))


@pytest.mark.parametrize(
    ("shape", "num_drafts"),
    [
        (Shape("antkv-1bit", 48, 2, 1, reorders=True), 0),
        (Shape("antkv-1bit", 48, 2, 1, reorders=True), 3),
        (Shape("antkv-0.75bit", 48, 2, 1), 0),
    ],
)
def test_pages_are_those_of_the_reference(shape, num_drafts):
    """An odd number of 12-bit codes; tiles of the sizes that GPUs run."""
    assert_pages_are_those_of_the_reference(TritonOperations, shape, num_drafts)


def test_anchors_are_stored_as_the_reference_stores_them():
    assert_stores_what_the_reference_stores(TritonOperations, Shape(num_heads=2, head_size=48, reorders=True))


def test_every_byte_of_an_anchor_is_read():
    assert_reads_every_byte(TritonOperations, Shape(num_heads=2, head_size=64, reorders=True), 1e-4)


def test_default_tiles_of_encoding(monkeypatch):
    monkeypatch.undo()
    engine = Engine(AntKVConfig(anchor_share=0, sinks=False, recency="none"), ONE_HEAD, TritonOperations)
    assert_offline(engine, serve(engine, [(20, 3), (1, 1)]))


@pytest.mark.parametrize("rules", [{}, {"window": 160, "soft_cap": 2.0, "has_sinks": True}], ids=str)
def test_tokens_in_hand_are_seen_exactly_where_prefill_does_not_read_the_cache(rules):
    config = AntKVConfig(recency="none", prefix=0, prefill_reads_cache=False)
    shape = Shape(num_heads=2, num_kv_heads=1, **rules)
    engines = [Engine(config, shape, build) for build in (TritonOperations, ReferenceOperations)]
    ours, theirs = (serve(engine, [(150, 1), (1, 1), (1, 127)]) for engine in engines)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.output, reference.output, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rules", [{"error": 1.0}, {"window": 150, "has_sinks": True}], ids=str)
def test_splits_are_merged(monkeypatch, rules):
    monkeypatch.setattr(triton_operations, "_MIN_SPLIT", 16)
    engine = Engine(AntKVConfig(recency="sliding:4"), replace(ONE_HEAD, **rules), TritonOperations)
    assert_offline(engine, serve(engine, [(260, 1), (1, 1), (1, 1)]))


def test_a_table_that_does_not_compose(monkeypatch):
    monkeypatch.setattr(triton_operations, "angles_are_linear", lambda table: False)
    engine = Engine(AntKVConfig(recency="none"), ONE_HEAD, TritonOperations)
    assert_offline(engine, serve(engine, [(140, 1), (1, 1)]))


class Planned(TritonOperations):
    """Steps come from a builder."""

    decoded = 0

    def run(self, rows, output, step):
        super().run(rows, output, planned(step, self._layer, self.decoded))


def through_a_varlen_kernel(layer: LayerState, kind: type[Planned] = Planned) -> TritonOperations:
    # As FlashAttention 3 has it for the heads that there are most of.
    return kind(replace(layer, varlen=varlen(400, narrow_values=layer.head_size == 48)))


@pytest.mark.parametrize(
    ("shape", "window", "anchor_dtype"),
    [
        (Shape("antkv-1bit", 48, 3, 1, torch.bfloat16, reorders=True, error=1.0), 32, "model"),
        (Shape("antkv-1bit", 32, 6, 2, torch.float16, rotary_dim=16, magnitude=1.3, reorders=True), 128, "fp8"),
        (Shape("antkv-2bit", 32, 3, 1, neox=False, three_parts="turns", error=1.0), 1, "fp8"),
        (Shape("antkv-0.75bit", 48, 3, 1, rotary_dim=0), 100, "model"),
    ],
    ids=lambda value: str(value),
)
def test_prompts_through_a_kernel_for_plain_rows(monkeypatch, shape, window, anchor_dtype):
    """Pieces of two blocks, a prefix in hand and in pages, and single tokens beside chunks."""
    monkeypatch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", 2)
    monkeypatch.setattr(triton_operations, "prefill", None)
    config = AntKVConfig(recency=f"sliding:{window}", anchor_share=0.03, anchor_dtype=anchor_dtype, prefix=5)
    assert_as_reference(config, shape, through_a_varlen_kernel, [[150, 3], [1, 140], [170, 1], [70, 120]])


class Overestimating(Planned):
    """The host knows lengths of requests with drafts as upper bounds alone."""

    decoded = 9


def test_drafts_beside_prompts_through_a_kernel_for_plain_rows(monkeypatch):
    monkeypatch.setattr(triton_operations, "prefill", None)
    shape = Shape("antkv-1bit", 48, 3, 1, error=1.0)
    builds = partial(through_a_varlen_kernel, kind=Overestimating), ReferenceOperations
    config = AntKVConfig(recency="sliding:32", prefill_reads_cache=False)
    ours, theirs = (serve_drafts(Engine(config, shape, build, num_drafts=3)) for build in builds)
    for mine, reference in zip(ours, theirs, strict=True):
        computed = slice(mine.computed)
        torch.testing.assert_close(mine.output[computed], reference.output[computed], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_merging_with_nothing(nothing):
    engine = Engine(AntKVConfig(), ONE_HEAD, TritonOperations)
    heads, head_size = ONE_HEAD.num_heads, engine.state.head_size
    output, other = torch.randn(2, 20, heads, head_size)
    lse, other_lse = torch.randn(2, heads, 20)
    other_lse[:, :3], lse[:, 3:5], lse[:, 2] = nothing, nothing, nothing
    other[:3], output[2:5] = 0, 0
    both = torch.stack([lse, other_lse]).masked_fill(torch.stack([lse, other_lse]).isinf(), -torch.inf)
    weights = both.softmax(0).nan_to_num().transpose(1, 2)[..., None]
    expected = (weights * torch.stack([output, other])).sum(0)
    for is_first in (False, True):
        merged, statistics = output.clone(), lse.clone()
        engine.operations._merge(Attended(merged, statistics), Attended(other, other_lse), is_first)
        torch.testing.assert_close(merged, other if is_first else expected)
        torch.testing.assert_close(statistics, both[1] if is_first else both.logsumexp(0))


class Padded(TritonOperations):
    """Operations as a CUDA graph calls them: with rows and requests that are not there."""

    def run(self, rows, output, step):
        padded = _longer(output)
        parts = rows.query, rows.key, rows.value, rows.is_sink
        super().run(StepRows(*(None if part is None else _longer(part) for part in parts)), padded, _padded(step))
        output.copy_(padded[: len(output)])
        assert padded[len(output) :].isnan().all()


def _longer(rows: torch.Tensor) -> torch.Tensor:
    fill = True if rows.dtype == torch.bool else torch.nan
    return torch.cat((rows, torch.full_like(rows[:1], fill), torch.full_like(rows[:1], fill)))


def _padded(step: StepPlan) -> StepPlan:
    return replace(
        step,
        query_start_loc=torch.nn.functional.pad(step.query_start_loc[None], (0, 2), mode="replicate")[0],
        seq_lens=torch.nn.functional.pad(step.seq_lens, (0, 2)),
        vq_block_table=torch.nn.functional.pad(step.vq_block_table, (0, 0, 0, 2)),
        recency_block_table=torch.nn.functional.pad(step.recency_block_table, (0, 0, 0, 2)),
    )


def test_padding_of_graphs_changes_nothing():
    engine = Engine(AntKVConfig(recency="sliding:4"), ONE_HEAD, Padded)
    engine.state.vq.k_codes[0] = 77
    assert_offline(engine, serve(engine, [(127, 1), (1, 1), (1, 1)]))
    assert (engine.state.vq.k_codes[0] == 77).all()
