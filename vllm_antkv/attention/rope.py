"""The rotary table of a layer, read from vLLM's rotary module."""

from typing import cast

from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_alpha_rope import DynamicNTKAlphaRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.dynamic_ntk_scaling_rope import DynamicNTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.ntk_scaling_rope import NTKScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.rope import RotaryTable

#: Modules whose turn depends on the position alone, through one table of cosines and sines.
SUPPORTED = (
    RotaryEmbedding,
    LinearScalingRotaryEmbedding,
    DynamicNTKAlphaRotaryEmbedding,
    DynamicNTKScalingRotaryEmbedding,
    NTKScalingRotaryEmbedding,
    Llama3RotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


def rotary_table(module: nn.Module, layer_name: str) -> RotaryTable:
    """The table that this rotary module applies, in float32 and not rounded to the model dtype.

    Raises UnsupportedModelError for kinds of RoPE that cannot be undone from a position (M-RoPE, LongRoPE, dual
    chunk, FoPE and others).
    """
    if type(module) not in SUPPORTED:
        known = ", ".join(cls.__name__ for cls in SUPPORTED)
        raise UnsupportedModelError(
            f"{layer_name} uses {type(module).__name__}, which an antkv cache cannot undo (it can undo {known})."
        )
    # Computed again, since the module's own copy is rounded to the model dtype: angles of exact tables add up, so that
    # kernels may turn by a tile's position first and by the offset in the tile after it.
    cos, sin = cast(RotaryEmbedding, module)._compute_cos_sin_cache().float().chunk(2, dim=-1)
    return RotaryTable(cos.contiguous(), sin.contiguous(), bool(module.is_neox_style))
