"""VLLM's description of recency pages, as the block managers have it."""

from typing import Any

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec

_FIXED = {"head_size": 64, "dtype": torch.uint8, "settings": AntKVConfig(), "interval": 512, "max_steps": 1}


def made_spec(block_size: int = 8, page_bytes: int = 2048, num_kv_heads: int = 1, **more: Any) -> RecencySpec:
    """Of requests of 4,096 tokens at most."""
    pages = {"block_size": block_size, "tokens_per_state": block_size, "state_content_bytes": page_bytes}
    return RecencySpec(**pages, **_FIXED, num_kv_heads=num_kv_heads, max_len=4096, **more)
