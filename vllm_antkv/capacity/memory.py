"""How many requests the cache of a GPU holds, computed from a model's sizes alone: no weights, no GPU, no vLLM.

A pool is what is left of GPU_SHARE of the memory after weights, codebooks and WORKSPACE_BYTES. Models are in 16
bits, as vLLM serves them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from vllm_antkv.cache.blocks import States, plan_blocks
from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout, page_layouts, pool_block_bytes
from vllm_antkv.cache.pool_blocks import BlockPlan
from vllm_antkv.capacity.gpus import Gpu
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import AntKVConfig
from vllm_antkv.layer_windows import layer_windows, num_state_layers, states_per_request
from vllm_antkv.presets import PRESETS, parts_of_mix

#: vLLM's default --gpu-memory-utilization.
GPU_SHARE = 0.92
#: Assumed for activations and CUDA graphs, which only a run can tell.
WORKSPACE_BYTES = 2e9
#: Bytes of an element of K or V in the caches that are not ours.
_ELEMENT_BYTES = {"auto": 2, "fp8": 1}
#: Names of the same number in the configs of Mamba-2 models: (Granite, Falcon-H1; Nemotron-H).
_MAMBA2 = (
    ("mamba_n_heads", "mamba_num_heads"),
    ("mamba_d_head", "mamba_head_dim"),
    ("mamba_d_state", "ssm_state_size"),
    ("mamba_n_groups", "n_groups"),
    ("mamba_d_conv", "conv_kernel"),
)
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class DecodeShape:
    """What a decode step of a dense model in 16 bits multiplies and keeps, on one GPU.

    matrix_weights: numbers in its matrices, the output layer included; embeddings are looked up.
    weights: all numbers.
    windows: of every layer, None for one without; empty: none has one.
    num_states: layers that keep a state, whether they are among `num_layers`, which attend, or not.
    state_bytes: of one of them.
    states_per_request: of each of them, while prefixes are cached.
    group: query heads per KV head.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    matrix_weights: int
    weights: int
    windows: tuple[int | None, ...] = ()
    num_states: int = 0
    state_bytes: int = 0
    states_per_request: int = 0
    group: int = 1

    @classmethod
    def of(cls, config: PretrainedConfig) -> "DecodeShape":
        """Counted without making the weights; UnsupportedModelError when the config lacks a size."""
        identity = ModelIdentity.from_hf_config(config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
        total = sum(parameter.numel() for parameter in model.parameters())
        windows = tuple(layer_windows(config.get_text_config()))
        sizes = (identity.num_layers, identity.num_kv_heads, identity.head_size)
        text = config.get_text_config()
        num_states = num_state_layers(text)
        states = num_states, state_bytes(text), states_per_request(text) if num_states else 0
        group = identity.num_attention_heads // identity.num_kv_heads
        return cls(*sizes, matrices, total, windows if any(windows) else (), *states, group=group)

    def of_rank(self, tensor_parallel_size: int) -> "DecodeShape":
        """What one of so many GPUs has of it, as vLLM cuts it: with more GPUs than KV heads, several hold the same."""
        num_kv_heads = max(1, self.num_kv_heads // tensor_parallel_size)
        return replace(
            self,
            num_kv_heads=num_kv_heads,
            group=max(1, self.group * self.num_kv_heads // tensor_parallel_size // num_kv_heads),
            matrix_weights=-(-self.matrix_weights // tensor_parallel_size),
            weights=-(-self.weights // tensor_parallel_size),
            state_bytes=-(-self.state_bytes // tensor_parallel_size),
        )

    @property
    def states(self) -> States | None:
        """Those of one of these GPUs; None where all layers attend."""
        per_head = -(-self.state_bytes // self.num_kv_heads)
        return States(self.num_states, per_head, self.states_per_request) if per_head else None

    @property
    def heads(self) -> int:
        """KV heads of all layers."""
        return self.num_layers * self.num_kv_heads

    def seen(self, context: int) -> float:
        """Tokens of a sequence of `context` that the next query sees, the mean of all layers."""
        return sum(min(context, window or context) for window in self.windows or (None,)) / (len(self.windows) or 1)

    @property
    def caches(self) -> list[str]:
        """Values of `--kv-cache-dtype` that fit the heads, by bits, the most first."""
        fitting = (preset.name for preset in PRESETS.values() if self.head_size % preset.sub_vector_size == 0)
        return [*_ELEMENT_BYTES, *fitting]


def sequence_bytes(shape: DecodeShape, kv_cache_dtype: str, context: int, settings: AntKVConfig | None = None) -> float:
    """Of a sequence of `context` tokens, per layer and KV head, everything counted; the mean of all layers.

    kv_cache_dtype: `auto`, `fp8` or a preset. settings: the server's defaults unless given.
    """
    states = shape.states
    if kv_cache_dtype in _ELEMENT_BYTES:
        of_states = states.all_bytes / shape.num_layers if states else 0
        return 2 * shape.seen(context) * shape.head_size * _ELEMENT_BYTES[kv_cache_dtype] + of_states
    settings = settings or AntKVConfig()

    def layouts_of(plan: BlockPlan) -> list[PageLayout]:
        presets = [PRESETS[kv_cache_dtype]] * (shape.num_layers if states else len(shape.windows) or 1)
        return page_layouts(settings, presets, shape.head_size, torch.bfloat16, plan=plan)

    layouts = layouts_of(plan_blocks(layouts_of, settings, states, context))
    of_states = states.request_bytes(pool_block_bytes(layouts)) if states else 0
    return (footprint(layouts, settings, context, shape.windows).total + of_states) / len(layouts)


def codebooks_of(shape: DecodeShape, kv_cache_dtype: str) -> int:
    """Bytes of the float16 centroids of K and V, as calibrated by default; 0 for a cache that has none."""
    if kv_cache_dtype not in PRESETS:
        return 0
    preset = PRESETS[kv_cache_dtype]
    num_centroids = max(part.num_centroids for part in parts_of_mix(preset, shape.head_size) or [preset])
    return shape.heads * 2 * num_centroids * shape.head_size * 2


def pool_bytes(shape: DecodeShape, gpu: Gpu, kv_cache_dtype: str) -> float:
    """Memory for the cache; 0 where the model does not fit."""
    reserved = 2 * shape.weights + codebooks_of(shape, kv_cache_dtype) + WORKSPACE_BYTES
    return max(0.0, GPU_SHARE * gpu.memory - reserved)


def largest_batch(
    shape: DecodeShape, gpu: Gpu, kv_cache_dtype: str, context: int, settings: AntKVConfig | None = None
) -> int:
    """Requests of `context` tokens that the cache holds at once."""
    sequence = shape.heads * sequence_bytes(shape, kv_cache_dtype, context, settings)
    return int(pool_bytes(shape, gpu, kv_cache_dtype) / sequence)


def state_bytes(config: Any) -> int:
    """What one layer without K and V keeps of a sequence, in 16 bits, as vLLM lays it out; 0 where none is known here.

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
