"""Keeps the blocks of requests that use the codebook's trained prefix apart from all others.

Blocks are found by the hash of their tokens and of those before. Whether the first ones hold trained rows depends on
tokens after them as well, as long as the prefix goes on: recency pages of 8 tokens are shorter than most prefixes. Such
requests therefore get a cache salt, which vLLM hashes into the first block and so into all.
"""

import functools

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from vllm_antkv.codebook.prefix import starts_with
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks.base import Hook, missing_attributes, new_plugin_groups
from vllm_antkv.vllm_adapter.hooks.patches import Patches

_SALT = "antkv-trained-prefix"


def _install(patches: Patches) -> None:
    original = EngineCore.preprocess_add_request

    @functools.wraps(original)
    def preprocess_add_request(self: EngineCore, request: EngineCoreRequest) -> tuple[Request, int]:
        if self.vllm_config.cache_config.cache_dtype in PRESETS:
            from vllm_antkv.vllm_adapter.attention.startup import resolved_codebook

            prefix = resolved_codebook(self.vllm_config).prefix
            if prefix and request.prompt_embeds is None and starts_with(request.prompt_token_ids, prefix):
                request.cache_salt = f"{request.cache_salt or ''} {_SALT}"
        return original(self, request)

    patches.set(EngineCore, "preprocess_add_request", preprocess_add_request)


HOOK = Hook(
    name="prefix_salt",
    why="plugins cannot add to the hash of a request's blocks",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    missing=lambda: missing_attributes(EngineCoreRequest, "cache_salt", "prompt_token_ids", "prompt_embeds"),
    superseded=lambda: bool(new_plugin_groups()),
)
