"""The rows that a calibrated method of the literature learns from.

Those of a calibration text where there is one (`--calibration`), and otherwise the first tokens of each window: these
then stay exact until all of them have been seen (`Retention.learn`), and what is learned is stored with the sequence.
"""

import torch

from research.literature.request import Sample
from vllm_antkv.ops.rope import RotaryTable, unrotate

#: Tokens of a window that are learned from when there is no calibration text: as many as KIVI's residual.
FIRST_TOKENS = 128


def learning_rows(
    sample: Sample | None, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V rows to learn from, heads side by side.

    Args:
        sample: a calibration text, or None.
        layer: index of the attention layer.
        key, value: (num_windows, num_tokens, num_kv_heads, head_size), the windows in hand, keys after RoPE.
        rotary: the table the keys were rotated with.

    Returns:
        Two of (num_windows, num_rows, num_kv_heads * head_size); 1 window, for all, where there is a sample.
    """
    if sample is None:
        keys, values = key[:, :FIRST_TOKENS], value[:, :FIRST_TOKENS]
        keys = unrotate(keys, torch.arange(keys.shape[1], device=keys.device), rotary)
        return keys.flatten(-2), values.flatten(-2)
    keys, values = sample.plain_key[layer].to(key), sample.value[layer].to(value)
    return keys.flatten(0, 1).flatten(-2)[None], values.flatten(0, 1).flatten(-2)[None]


def learned_from(sample: Sample | None) -> str:
    """For the settings of a figure."""
    return f"first {FIRST_TOKENS} tokens" if sample is None else sample.text
