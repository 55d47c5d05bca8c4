"""Bytes of what a layer without K and V keeps of a sequence, from a model's config alone, as vLLM lays it out."""

from typing import Any

#: Names of the same number in the configs of Mamba-2 models: (Granite, Falcon-H1; Nemotron-H).
_MAMBA2 = (
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
    ("mamba_d_state", "ssm_state_size"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_conv", "conv_kernel"),
)
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def state_bytes(config: Any) -> int:
    """Of one layer of a model in 16 bits; 0 where no layer has a state that is known here.

    Args:
        config: of the text model.
    """
    convolved, recurrent = _elements(config)
    dtype = getattr(config, "mamba_ssm_dtype", None) or getattr(config, "mamba_ssm_cache_dtype", None)
    return 2 * convolved + _ITEMSIZE.get(str(dtype), 2) * recurrent


def _elements(config: Any) -> tuple[int, int]:
    """Of the inputs that a convolution still sees, and of the state of the recurrence."""
    if hasattr(config, "conv_L_cache"):
        return (config.conv_L_cache - 1) * getattr(config, "conv_dim", config.hidden_size), 0
    if hasattr(config, "linear_key_head_dim"):
        values = config.linear_num_value_heads * config.linear_value_head_dim
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        return (config.linear_conv_kernel_dim - 1) * (2 * keys + values), values * config.linear_key_head_dim
    mamba2 = [getattr(config, name) for names in _MAMBA2 for name in names if hasattr(config, name)]
    if len(mamba2) == len(_MAMBA2):
        heads, head_size, state, groups, kernel = mamba2
        return (kernel - 1) * (heads * head_size + 2 * groups * state), heads * head_size * state
    if hasattr(config, "mamba_d_state"):
        channels = config.mamba_expand * config.hidden_size
        return (config.mamba_d_conv - 1) * channels, channels * config.mamba_d_state
    return 0, 0
