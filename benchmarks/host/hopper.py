"""What vLLM finds on Hopper and not here: the platform's answers, and operators that builds for CUDA alone have.

The operators are FlashAttention 3's and the one that stores a step's K and V. They take what vLLM hands them, and
compute nothing.
"""

import importlib
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import fa_utils

from benchmarks.host.driver import CAPABILITY

_ROTARY = "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary"
_SCALES = "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
#: As in vLLM's FlashAttention (hopper/flash_api_torch_lib.cpp) and in its csrc/torch_bindings.cpp.
_FORWARD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    f"int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, {_ROTARY}, {_SCALES}, "
    "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
    "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
    "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
_SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, "
    "int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, "
    "bool is_causal, int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, "
    "int sm_margin) -> Tensor"
)
_STORE = (
    "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, str kv_cache_dtype, Tensor k_scale, Tensor v_scale) -> ()"
)
_EXTENSION = "_vllm_fa3_C"
_PLACE_OF_SCHEDULE = 29


@contextmanager
def on_hopper() -> Iterator[None]:
    """VLLM chooses its backends and kernels as on an H100 or H200."""
    _register_operators()
    answers: dict[str, Any] = {
        "is_cuda": True,
        "get_device_capability": DeviceCapability(*CAPABILITY),
        "is_device_capability_family": True,
        "has_device_capability": True,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(type(current_platform), name, lambda *arguments, said=answer: said))
        _find_kernels()
        yield


class CountedOperators(TorchDispatchMode):
    """Counts kernels that PyTorch's operators, and these, would start in its context.

    num_launches: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_launches = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Count it and let it go on."""
        self.num_launches += _launches(func._schema, args)
        return func(*args, **(kwargs or {}))


def _launches(schema: Any, arguments: tuple[Any, ...]) -> int:
    if schema.name == f"{_EXTENSION}::fwd":
        # Handed no schedule, it makes one in a kernel of its own.
        return 1 if arguments[_PLACE_OF_SCHEDULE] is not None else 2
    # What only makes or views a tensor starts nothing.
    makes = schema.name.removeprefix("aten::").startswith(("empty", "new_empty"))
    views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
    return 0 if makes or views else 1


@cache
def _register_operators() -> list[torch.library.Library]:
    # vLLM imports the extension that brings them.
    module = ModuleType(f"vllm.vllm_flash_attn.{_EXTENSION}")
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    sys.modules[module.__name__] = module
    fa3, store = (torch.library.Library(name, "FRAGMENT") for name in (_EXTENSION, "_C_cache_ops"))
    for library, schema, computed in ((fa3, _FORWARD, _forward), (fa3, _SCHEDULE, _schedule), (store, _STORE, _store)):
        library.define(schema)
        library.impl(schema.partition("(")[0], computed, "Meta")
    return [fa3, store]


@cache
def _find_kernels() -> None:
    """VLLM looks for them when this module is imported, and others do that before."""
    importlib.reload(fa_utils)


def _forward(query: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
    output = rest[5]
    statistics = query.new_empty(query.shape[1::-1], dtype=torch.float32)
    return [torch.empty_like(query) if output is None else output, statistics, statistics, statistics]


def _schedule(batch_size: int, *rest: Any) -> torch.Tensor:
    seqused_k: torch.Tensor = rest[7]
    return seqused_k.new_empty(1 + 4 * batch_size)


def _store(*arguments: Any) -> None:
    """Nothing is stored."""
