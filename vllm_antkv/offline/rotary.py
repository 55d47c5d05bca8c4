"""The rotary table of a Hugging Face model, as its own rotary module computes it."""

import torch
from transformers import PreTrainedModel

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.rope import RotaryTable


def rotary_table(model: PreTrainedModel, num_positions: int) -> RotaryTable:
    """Ask the model for the cosines and sines of positions 0 to num_positions - 1.

    The positions go in as one sequence, so that tables which depend on the length (dynamic NTK, LongRoPE) are those the
    model uses for a window of that length.

    Returns:
        a table of (num_positions, rotary_dim / 2) float32 on the model's device.
    """
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    if rotary is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no rotary position embedding that can be read.")
    positions = torch.arange(num_positions, device=model.device)
    # The module answers in the dtype of its first argument; rounded to bfloat16 the inverse would lose 3 digits of K.
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32, device=model.device), positions[None])
    half = cos.shape[-1] // 2
    if not torch.equal(cos[..., :half], cos[..., half:]):
        raise UnsupportedModelError(f"{type(model).__name__} rotates neighbouring channels, which is not supported.")
    return RotaryTable(cos[0, :, :half], sin[0, :, :half])
