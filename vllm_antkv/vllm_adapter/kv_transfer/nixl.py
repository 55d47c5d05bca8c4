"""vLLM's KV connector `NixlConnector`: pages of all classes go from a server that computes prompts to one that answers.

vLLM's hands over a prompt whole. Its last token is computed again by the server that answers, whose query would then
vote for anchors twice. So what goes over are whole blocks, as a prefix-cache hit finds them: the one server computes no
more, the other computes the rest. Pages that do not arrive, or are not what they should be, are computed.
"""

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from cachetools import LRUCache
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlBaseConnector, NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.kv_transfer import NIXL
from vllm_antkv.vllm_adapter.kv_transfer.identity import has_lasting_hashes
from vllm_antkv.vllm_adapter.kv_transfer.settings import IDENTITY_KEY

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

#: Of `kv_transfer_params`: the hash of the tokens whose pages are offered. It finds mistakes and is no secret: vLLM's
#: hashes of tokens begin with a fixed seed. Clients must not reach these parameters (`docker/prefill_proxy.py`).
_PREFIX_KEY = "antkv_prefix"
#: Requests that were pulled lately. The other server gives their pages up after the first pull.
_NUM_PULLED = 1 << 16


class _Scheduler(NixlPullConnectorScheduler):
    """Offers and asks for the whole blocks of a prompt, up to the last one that leaves a token to compute."""

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._step, self._hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._num_left = 0
        self._pulled: LRUCache[str, bool] = LRUCache(_NUM_PULLED)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Those that the other server offers, unless it means other tokens or has given them up."""
        params = request.kv_transfer_params or {}
        offered = params.get(_PREFIX_KEY)
        if offered is None or params.get("remote_request_id") in self._pulled:
            return 0, False
        if offered != self._prefix(request, self._get_remote_prefill_token_count(request.num_prompt_tokens)):
            return 0, False
        found: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    def update_state_after_alloc(self, request: Request, blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """Note what is pulled."""
        if num_external_tokens:
            assert request.kv_transfer_params is not None
            self._pulled[request.kv_transfer_params["remote_request_id"]] = True
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Say of which tokens the pages are."""
        delays, params = super().request_finished(request, block_ids)
        if params is not None and (request.kv_transfer_params or {}).get("_p_side_truncated"):
            params[_PREFIX_KEY] = self._prefix(request, request.num_prompt_tokens)
        return delays, params

    def get_exchange_clipped_blocks(self, block_ids: Any, clip_ssm: bool = True) -> Any:
        """Without null blocks, which recency pages that nobody reads have: what is left, both servers have."""
        groups = super().get_exchange_clipped_blocks(block_ids, clip_ssm)
        return tuple([block_id for block_id in group if block_id] for group in groups)

    def _prefill_backoff(self) -> int:
        return self._num_left

    def _truncate_request_for_prefill(self, request: Request) -> None:
        num_tokens = request.num_prompt_tokens
        self._num_left = num_tokens - self._get_remote_prefill_token_count(num_tokens)
        super()._truncate_request_for_prefill(request)

    def _get_remote_prefill_token_count(self, num_prompt_tokens: int) -> int:
        return (num_prompt_tokens - 1) // self._step * self._step

    def _prefix(self, request: Request, num_tokens: int) -> str | None:
        """The hash of a request's first whole blocks, or None where hashes tell too little."""
        num_hashes = num_tokens // self._hash_block_size
        return request.block_hashes[num_hashes - 1].hex() if num_hashes > 0 and has_lasting_hashes(request) else None


class _Worker(NixlPullConnectorWorker):
    """Reads pages only from servers that have the same identity."""

    compat_hash: str | None
    xfer_handshake_metadata: NixlHandshakePayload | None

    def __init__(self, vllm_config: VllmConfig, engine_id: str, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.enforce_compat_hash = True

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the pages of all layers; other servers are told the identity with them."""
        super().register_kv_caches(kv_caches)
        extra = self.kv_transfer_config.kv_connector_extra_config
        own = f"{self.compat_hash} {extra[IDENTITY_KEY]} {self.transfer_tp_size}"
        self.compat_hash = hashlib.sha256(own.encode()).hexdigest()
        assert self.xfer_handshake_metadata is not None
        self.xfer_handshake_metadata = replace(self.xfer_handshake_metadata, compatibility_hash=self.compat_hash)

    def _apply_prefix_caching(self, decode_block_ids: Any, prefill_block_ids: Any, **_: int) -> tuple[Any, Any]:
        """The last pages of each class, of some perhaps none: vLLM's takes the last 0 for all."""
        pairs = zip(decode_block_ids, prefill_block_ids, strict=True)
        return decode_block_ids, [remote[len(remote) - len(local) :] for local, remote in pairs]


class NixlConnector(NixlPullConnector):
    """See the module."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        arguments = (vllm_config, self.engine_id, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = _Scheduler(*arguments)
        else:
            self.connector_worker = _Worker(*arguments)

    def stop(self) -> None:
        """What other servers were told of these pages is true no more.

        Raises:
            SettingsError: always.
        """
        raise SettingsError(f"Weights cannot be reloaded beside {NIXL}: start both servers again.")
