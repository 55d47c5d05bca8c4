"""Finds where a model runner keeps the positions of a step's tokens, where a token has three of them (M-RoPE).

Attention metadata has one position per token at most, its place in the sequence. The runner computes the three before
every step, into memory that stays where it is, so that CUDA graphs can read it.
"""

from typing import Any

import torch
from vllm.model_executor.models.interfaces import supports_mrope

from vllm_antkv.cache.positions import NUM_POSITIONS
from vllm_antkv.errors import UnsupportedModelError


def positions_of_step(runner: Any) -> torch.Tensor:
    """(3, at least max_num_batched_tokens) int64 of a model runner of either version, on its device.

    Raises:
        UnsupportedModelError: it keeps them elsewhere, or in another shape, or vLLM has none for the loaded model.
    """
    model = runner.get_model()
    if not supports_mrope(model):
        # Otherwise an assertion of vLLM's would end the engine at the first request.
        raise UnsupportedModelError(
            f"The config of this model has M-RoPE (mrope_section), but vLLM does not know how {type(model).__name__} "
            "gives its tokens three positions, and serves it with no KV cache."
        )
    # Runner V1 has them itself, V2 in the state of the model.
    buffer = getattr(runner, "mrope_positions", None)
    state = getattr(getattr(runner, "model_state", None), "rope_state", None)
    positions = getattr(buffer, "gpu", None) if buffer is not None else getattr(state, "positions", None)
    if positions is None or positions.ndim != 2 or len(positions) != NUM_POSITIONS:
        raise UnsupportedModelError(
            f"vLLM's {type(runner).__name__} does not say by which three positions M-RoPE turns the tokens of a step: "
            "serve this model with --kv-cache-dtype auto."
        )
    return positions  # type: ignore[no-any-return]
