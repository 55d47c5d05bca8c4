"""Engines of vLLM that evaluations run: their options, and how they start and stop.

vLLM is imported only when one starts; the settings reach it as they reach a server, through `--kv-cache-dtype` and
`--additional-config`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_args

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError, reason
from vllm_antkv.layer_windows import has_mamba2
from vllm_antkv.offline.adapters import Adapter, read_adapter
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.presets import PRESETS

if TYPE_CHECKING:
    from vllm import LLM

#: Sequences handed to vLLM at a time: its scheduler batches within, the progress bar moves between.
SEQUENCES_PER_CALL = 8
#: The cache holds these in full precision twice over, as pages may be half empty.
_CACHE_SLACK = 2
_LEAST_CACHE_BYTES = 64 << 20
#: Characters kept of what vLLM says when it does not start; pydantic's reasons begin on the third line.
_MAX_REASON = 400


def check_kv_cache_dtypes(names: Sequence[str]) -> None:
    """Are there all of these? Better asked before the first engine starts than after hours. None needs no vLLM.

    Raises:
        SettingsError: a `kv_cache_dtype` that there is not.
        UnsupportedModelError: vLLM cannot be imported.
    """
    if not names:
        return
    try:
        from vllm_antkv.vllm_adapter.hooks.dtype import known_dtypes
    except ImportError as error:
        raise UnsupportedModelError(f"vLLM cannot be imported ({reason(error)}): see `antkv doctor`.") from None
    known = dict.fromkeys((*PRESETS, *known_dtypes()))
    for name in names:
        if name not in known:
            raise SettingsError(f"The KV cache dtype is '{name}', but must be one of {', '.join(known)}.")


def engine_options(card: ModelCard, kv_cache_dtype: str, config: AntKVConfig, context: int) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`.

    The cache has room for a few sequences of `context` tokens, whatever else runs on the machine: without a size, vLLM
    would want nearly all memory, and not start where that is not free.

    Raises as `check_kv_cache_dtypes` does.
    """
    check_kv_cache_dtypes([kv_cache_dtype])
    identity = card.identity
    token_bytes = 2 * identity.num_layers * identity.num_kv_heads * identity.head_size * card.dtype.itemsize
    settings = config.model_dump(exclude_defaults=True)
    # With Mamba-2 vLLM's CPU build fails otherwise, whatever the cache dtype.
    without_prefix_caching = has_mamba2(card.config.get_text_config()) and not torch.cuda.is_available()
    return {
        "model": card.name,
        # vLLM would serve a float32 checkpoint in half precision, and that difference is not ours to measure.
        "dtype": str(card.dtype).removeprefix("torch."),
        "kv_cache_dtype": kv_cache_dtype,
        "additional_config": {"antkv": settings} if kv_cache_dtype in PRESETS else {},
        "max_model_len": context,
        # What is read here is text.
        "language_model_only": True,
        "kv_cache_memory_bytes": max(_LEAST_CACHE_BYTES, _CACHE_SLACK * SEQUENCES_PER_CALL * context * token_bytes),
        **({"enable_prefix_caching": False} if without_prefix_caching else {}),
        **_lora_options(card.adapter),
    }


def _lora_options(adapter: Adapter | None) -> dict[str, Any]:
    if adapter is None:
        return {}
    from vllm.config.lora import MaxLoRARanks

    config = read_adapter(adapter.folder, SettingsError)
    modules = config.get("target_modules")
    rank = max([config.get("r", 1), *config.get("rank_pattern", {}).values()])
    return {
        "enable_lora": True,
        # Of a rank above all of them, vLLM says which there are.
        "max_lora_rank": min((known for known in get_args(MaxLoRARanks) if known >= rank), default=rank),
        # On CPUs, where LoRA is applied to logits, vLLM fails at those of prompts.
        "lora_target_modules": modules if isinstance(modules, list) else None,
    }


@contextmanager
def starting() -> Iterator[None]:
    """While vLLM starts: what it raises becomes one sentence.

    Raises UnsupportedModelError.
    """
    try:
        yield
    except Exception as error:  # vLLM raises anything from pydantic's errors to RuntimeError when it cannot start
        gist = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
        raise UnsupportedModelError(f"vLLM does not start with this model and settings: {gist}.") from error


@contextmanager
def running_engine(
    card: ModelCard, kv_cache_dtype: str, config: AntKVConfig, context: int, **more: Any
) -> "Iterator[LLM]":
    """An engine while this is open, `more` of vLLM's arguments; errors as of `engine_options` and `starting`."""
    options = engine_options(card, kv_cache_dtype, config, context)
    from vllm import LLM

    with starting():
        engine = LLM(**options, **more)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
