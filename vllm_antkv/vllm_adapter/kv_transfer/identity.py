"""Which servers may read each other's pages: those in which all that decides a page's bytes is the same.

The tokens, `cache_salt` and those of before are in vLLM's hash of a block. Here is the rest.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.request import Request

from vllm_antkv import __version__
from vllm_antkv.codebook.revision import revision_of
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.kv_transfer import EXTRA_KEY, MODULES, STORE, connectors
from vllm_antkv.vllm_adapter.kv_transfer.settings import IDENTITY_KEY, StoreSettings

#: Methods of speculative decoding that look at tokens alone.
_WITHOUT_PAGES = ("ngram", "suffix")
_FILES = ("*.safetensors", "*.bin", "*.pt", "*.py")


def prepare(vllm_config: VllmConfig, settings: AntKVConfig, **codes: Any) -> None:
    """Complete the configuration of connectors.

    Args:
        vllm_config: of a server with an antkv cache.
        settings: the user's, completed.
        codes: what else decides pages: the codebook's identity, the layers without codes.

    Raises:
        SettingsError, CodebookError: settings of a connector, or no files of weights.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return
    identity = _identity(vllm_config, settings, codes)
    for connector in connectors(transfer):
        extra = connector.setdefault(EXTRA_KEY, {})
        if connector["kv_connector"] == STORE:
            StoreSettings.of(extra)
        extra[IDENTITY_KEY] = identity
        connector["kv_connector_module_path"] = MODULES[connector["kv_connector"]]
    if transfer.kv_connector in MODULES:
        transfer.kv_connector_module_path = MODULES[transfer.kv_connector]
    # A page that turns out to be damaged is one that is not there. vLLM's default ends the request.
    transfer.kv_load_failure_policy = "recompute"


def has_lasting_hashes(request: Request) -> bool:
    """Not where vLLM's hashes have names that may stand for something else tomorrow: of adapters, of images."""
    return request.lora_request is None and not request.mm_features


def _identity(vllm_config: VllmConfig, settings: AntKVConfig, codes: dict[str, Any]) -> str:
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    what = {
        "versions": (__version__, vllm.__version__),
        "device": current_platform.device_type,
        "weights": _weights(model_config.model, model_config.revision),
        # Wherever the model is.
        "config": {**model_config.hf_config.to_dict(), "_name_or_path": None},
        "dtype": model_config.dtype,
        "quantization": model_config.quantization,
        "stages": vllm_config.parallel_config.pipeline_parallel_size,
        # Some kinds of RoPE depend on it.
        "max_model_len": model_config.max_model_len,
        "cache_dtype": cache_config.cache_dtype,
        "hashes": cache_config.prefix_caching_hash_algo,
        "settings": settings.of_pages,
        "drafts": _drafts(vllm_config),
        **codes,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _drafts(vllm_config: VllmConfig) -> dict[str, Any] | None:
    """What decides the pages of a model that drafts, which lie beside the others; None where none does."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in _WITHOUT_PAGES:
        return None
    model_config = speculative.draft_model_config
    is_other = model_config.model != vllm_config.model_config.model
    return {
        "method": speculative.method,
        "weights": _weights(model_config.model, model_config.revision) if is_other else None,
        "config": {**model_config.hf_config.to_dict(), "_name_or_path": None},
        "dtype": model_config.dtype,
        "quantization": model_config.quantization,
    }


def _weights(model: str, revision: str | None) -> str:
    """A commit of the Hugging Face hub, or the hash of a folder's files, whole: training may change a few rows."""
    folder = Path(model)
    if not folder.is_dir() or folder.parent.name == "snapshots":
        return revision_of(model, revision)
    files = sorted(path for pattern in _FILES for path in folder.glob(pattern))
    if not files:
        raise SettingsError(f"KV connectors tell weights by their files, and {folder} has none.")
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
