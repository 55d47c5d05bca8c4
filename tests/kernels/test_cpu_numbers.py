"""Numbers far outside the usual cost bfloat16 models no more than rounding K and V does, as `auto` does."""

import pytest
import torch

from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import paged
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.reference import mixed_attention

SHAPE = Shape("antkv-1bit", 64, 8, 2, torch.bfloat16, reorders=True)
LENGTH = 390


def with_outliers(sequence: Sequence) -> None:
    """Some of them make logits of hundreds of thousands; float32 holds no larger ones to a tenth."""
    generator = torch.Generator().manual_seed(5)
    for rows, outlier in ((sequence.query, 100), (sequence.key, 1e4), (sequence.value, 1e4)):
        chosen = torch.randperm(LENGTH, generator=generator)[:20]
        rows[chosen, :, 7] = outlier


def with_negative_zeros(sequence: Sequence) -> None:
    for rows in (sequence.query, sequence.key, sequence.value):
        rows[::3] = -0.0
        rows[:, :, ::2] = -0.0


CHANGES = {
    "usual": lambda sequence: None,
    "sharp logits": lambda sequence: sequence.query.mul_(16),
    "rows with outliers": with_outliers,
    "an outlier channel": lambda sequence: sequence.key[:, :, 3].add_(300),
    "tiny numbers": lambda sequence: [rows.mul_(1e-30) for rows in (sequence.query, sequence.key, sequence.value)],
    "negative zeros": with_negative_zeros,
}


def output(operations, change, compute_dtype: torch.dtype) -> torch.Tensor:
    """Of a prompt in two steps and some tokens behind it, from memory full of NaN.

    Without anchors: where logits are huge, nearly all votes are 0, and which row is chosen hangs on the last bits.
    """
    engine = Engine(AntKVConfig(anchor_share=0.0, sinks=False), SHAPE, operations, compute_dtype)
    sequence = draw_sequence(0, LENGTH, SHAPE)
    change(sequence)
    for count in (200, LENGTH - 203, 1, 1, 1):
        engine.step([(sequence, count)])
    return sequence.output.double()


def with_rounded_rows(query, coded, *arguments):
    key, value = (rows.bfloat16().to(query.dtype) for rows in (coded.key, coded.value))
    return mixed_attention(query, coded._replace(key=key, value=value), *arguments)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_errors_are_those_of_rounding_to_bfloat16(kernels, change, monkeypatch):
    ours = output(kernels, change, torch.float32)
    exact = output(ReferenceOperations, change, torch.float64)
    monkeypatch.setattr(paged, "mixed_attention", with_rounded_rows)
    rounded = output(ReferenceOperations, change, torch.float64)
    assert ours.isfinite().all()

    def size(error: torch.Tensor) -> torch.Tensor:
        """Root mean square of every query's errors, all heads together."""
        return error.square().mean((1, 2)).sqrt()

    # Outputs are rounded in both; weights, to half a percent, in ours.
    allowed = size(rounded - exact) + size(exact) / 128
    assert (size(ours - exact) <= 2 * allowed + 1e-30).double().mean() > 0.98
    assert size(ours - exact).mean() <= 1.5 * allowed.mean()


def test_huge_logits_change_no_query_beside_them(kernels):
    """What weights are relative to is then too large for the shortest way of computing them."""
    huge = torch.arange(LENGTH) % 5 == 0
    outputs = []
    for factor in (1, 1e5):
        engine = Engine(AntKVConfig(anchor_share=0.0, sinks=False), SHAPE, kernels, torch.float32)
        sequence = draw_sequence(0, LENGTH, SHAPE)
        sequence.query[huge] *= factor
        engine.step([(sequence, LENGTH)])
        assert sequence.output.isfinite().all()
        outputs.append(sequence.output[~huge])
    assert torch.equal(*outputs)
