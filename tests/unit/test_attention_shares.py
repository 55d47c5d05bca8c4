"""Sampled shares of attention: what the specification's own attention gives, measured with telling values."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.engine import Engine, Shape, draw_sequence
from vllm_antkv.cache.pages import VQPages
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import attention_shares as module
from vllm_antkv.ops.attention_shares import attention_shares
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.reference import correction
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.select.anchors import EXACT_ANCHOR

LENGTHS = (300, 389)


def decoded_engine(config: AntKVConfig, shape: Shape) -> tuple[Engine, StepPlan, torch.Tensor, torch.Tensor]:
    """Two sequences whose last tokens were computed in one decode step; that step, its queries and its keys."""
    engine = Engine(config, shape, ReferenceOperations)
    sequences = [draw_sequence(seed, length, shape) for seed, length in enumerate(LENGTHS)]
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        engine.step([(sequence, length - 1)])
    run, seen = engine.operations.run, []
    engine.operations = SimpleNamespace(run=lambda *step: (run(*step), seen.append(step)))
    engine.step([(sequence, 1) for sequence in sequences])
    ((rows, _, step),) = seen
    return engine, step, rows.query, rows.key


def attention_to_exact_values(
    layer: LayerState, step: StepPlan, query: torch.Tensor, key: torch.Tensor, kv_head: int
) -> float:
    """The attention's output when exact V rows are 1 and coded ones 0: how much went to the exact rows."""
    output = torch.empty_like(query)
    ReferenceOperations(layer).attend(StepRows(query, key, torch.ones_like(key), None), output, step)
    return float(output[-1].unflatten(0, (key.shape[1], -1))[kv_head].mean())


def with_values(layer: LayerState, recent: float, anchors: float) -> LayerState:
    """The layer with these V rows, and V anchors where the K anchors are."""
    offsets = layer.vq.anchor_offsets.clone()
    offsets[:, :, 1] = offsets[:, :, 0]
    of_zero = correction(torch.tensor(anchors), torch.tensor(0.0))
    rows = of_zero.repeat(*layer.vq.v_anchors.shape)
    in_pairs = VQPages.as_exact_rows(rows, layer.recency.v.dtype)
    in_pairs[offsets[:, :, 1, : 2 * in_pairs.shape[2] : 2] >= EXACT_ANCHOR] = anchors
    vq = replace(layer.vq, anchor_offsets=offsets, v_anchors=rows)
    recency = replace(layer.recency, v=torch.full_like(layer.recency.v, recent))
    return replace(layer, vq=vq, recency=recency, v_centroids=torch.zeros_like(layer.v_centroids))


@pytest.mark.parametrize("kv_head", [0, 1])
@pytest.mark.parametrize("chunk_blocks", [1, 32])
@pytest.mark.parametrize(
    "settings, shape",
    [
        ({"anchor_share": 0.05}, Shape()),
        ({"anchor_dtype": "model", "anchor_share": 0.03}, Shape(dtype=torch.bfloat16)),
        ({"anchor_share": 0.2, "recency": "none", "prefix": 0}, Shape(num_heads=2)),
        ({"recency": "log:42"}, Shape(preset="antkv-0.75bit", head_size=32, rotary_dim=0)),
        (
            {"anchor_share": 0.05, "sinks": False},
            Shape(dtype=torch.bfloat16, rotary_dim=8, magnitude=1.3, reorders=True),
        ),
        ({"anchor_share": 0.05}, Shape(three_parts="turns", reorders=True)),
    ],
)
def test_shares_are_those_of_the_specification(monkeypatch, settings, shape, chunk_blocks, kv_head):
    monkeypatch.setattr(module, "_CHUNK_BLOCKS", chunk_blocks)
    engine, step, query, key = decoded_engine(AntKVConfig(**settings), shape)
    layer = with_values(engine.state, recent=1.0, anchors=1.0)
    recent, anchors, codes = attention_shares(layer, query[-1], key[-1:], step, kv_head).tolist()
    expected = attention_to_exact_values(layer, step, query, key, kv_head)
    tolerance = 0.01 if shape.dtype == torch.bfloat16 else 1e-5
    assert recent + anchors == pytest.approx(expected, abs=tolerance)
    without_anchors = with_values(engine.state, recent=1.0, anchors=0.0)
    expected = attention_to_exact_values(without_anchors, step, query, key, kv_head)
    assert recent == pytest.approx(expected, abs=tolerance)
    assert codes == pytest.approx(1 - recent - anchors)
    assert min(recent, anchors, codes) > 0


@pytest.mark.parametrize("num_new", [2, 30, 200])
def test_the_last_query_of_a_prompt_has_the_shares_of_the_specification(num_new):
    """It fills a block, whose new rows in full precision get no pages: nobody reads them afterwards."""
    engine, length = Engine(AntKVConfig(anchor_share=0.05), Shape(), ReferenceOperations), 384
    sequences = [draw_sequence(seed, length, Shape()) for seed in range(2)]
    for sequence in sequences:
        engine.step([(sequence, length - num_new)])
    operations, measured = engine.operations, []

    def run_and_measure(rows, output, step):
        operations.run(rows, output, step)
        layer = with_values(engine.state, recent=1.0, anchors=0.0)
        expected = attention_to_exact_values(layer, step, rows.query, rows.key, 1)
        measured.append((attention_shares(layer, rows.query[-1], rows.key[-num_new:], step, 1).tolist(), expected))

    engine.operations = SimpleNamespace(run=run_and_measure)
    engine.step([(sequence, num_new) for sequence in sequences])
    (((recent, anchors, codes), expected),) = measured
    assert recent == pytest.approx(expected, abs=1e-5)
    assert min(recent, anchors, codes) > 0


def test_an_anchor_of_k_alone_counts_half():
    engine, step, query, key = decoded_engine(AntKVConfig(anchor_share=0.1), Shape())
    both = with_values(engine.state, recent=1.0, anchors=1.0)
    offsets = both.vq.anchor_offsets.clone()
    offsets[:, :, 1] = -1
    only_k = replace(both, vq=replace(both.vq, anchor_offsets=offsets))
    whole, half = (attention_shares(layer, query[-1], key[-1:], step, 1) for layer in (both, only_k))
    assert half[1] == pytest.approx(float(whole[1]) / 2)
    assert half[0] == whole[0]


def test_everything_recent_is_all_of_the_attention():
    engine, step, query, key = decoded_engine(AntKVConfig(recency="sliding:500"), Shape())
    # Of some of these queries the rounded shares add up to a little more than 1, and counters cannot go down.
    queries = torch.randn(50, *query[-1].shape, generator=torch.Generator().manual_seed(0), dtype=query.dtype)
    for any_query in queries:
        shares = attention_shares(engine.state, any_query, key[-1:], step, 0).tolist()
        assert shares == pytest.approx([1, 0, 0], abs=1e-6)
        assert min(shares) >= 0


def test_centroids_in_float16_are_computed_with_in_float32():
    """As layers on GPUs hold them; codebooks are float16, so nothing is lost."""
    engine, step, query, key = decoded_engine(AntKVConfig(), Shape(rotary_dim=0))
    halves = replace(engine.state, k_centroids=engine.state.k_centroids.half())
    shares = [attention_shares(layer, query[-1], key[-1:], step, 0) for layer in (engine.state, halves)]
    torch.testing.assert_close(*shares, rtol=0, atol=0)
