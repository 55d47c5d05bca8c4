"""Flags of sinks, from the hidden states of a step."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_antkv.codebook import SinkRule
from vllm_antkv.vllm_adapter.step.sinks import SinkFlags

NUM_TOKENS, HIDDEN_SIZE, CHANNELS = 500, 300, (7, 123)


class Largest(TorchDispatchMode):
    """The most numbers that an operation made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in {
            arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)
        }:
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("has_residual", [False, True])
def test_flags_are_those_of_the_whole_sum_and_only_its_channels_are_read(has_residual):
    generator = torch.Generator().manual_seed(0)
    hidden, residual = torch.randn(2, NUM_TOKENS, HIDDEN_SIZE, generator=generator).bfloat16()
    whole = hidden.float() + (residual.float() if has_residual else 0)
    threshold = float(whole[:, CHANNELS].abs().amax(1).median())
    flags = SinkFlags(SinkRule(layer=1, channels=CHANNELS, threshold=threshold), 400, torch.device("cpu"))
    with Largest() as largest:
        flags.update(hidden, residual if has_residual else None)
    expected = (whole[:400, CHANNELS].abs() > threshold).any(1)
    assert 0 < expected.sum() < 400
    assert torch.equal(flags.of_step(400), expected)
    assert largest.numel <= NUM_TOKENS * len(CHANNELS)
