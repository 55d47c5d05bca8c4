"""Checks and completes the engine's configuration as soon as it exists, in the process the user started.

A refusal is then one sentence at start-up, not a failure of a worker process later. The configuration also says which
class the worker processes make.
"""

import functools
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_antkv.errors import SettingsError
from vllm_antkv.presets import get_preset
from vllm_antkv.releases import minor_release
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches, changed_signature, new_plugin_groups
from vllm_antkv.vllm_adapter.kv_transfer import NIXL, names

_WORKER = "vllm_antkv.vllm_adapter.hooks.worker.AntKVWorker"


def _install(patches: Patches) -> None:
    original = EngineArgs.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if _is_no_preset(self.kv_cache_dtype):
            return original(self, *args, **kwargs)
        from vllm_antkv.vllm_adapter.plan.refusals import refuse_context_parallelism
        from vllm_antkv.vllm_adapter.plan.startup import complete

        refuse_context_parallelism(self)
        vllm_config = original(self, *args, **kwargs)
        complete(vllm_config)
        _refuse_another_nixl(vllm_config)
        vllm_config.parallel_config.worker_cls = _WORKER
        return vllm_config

    patches.set(EngineArgs, "create_engine_config", create_engine_config)


def _refuse_another_nixl(vllm_config: VllmConfig) -> None:
    """Raises SettingsError where vLLM's connector, of which ours is a part, is not as we know it."""
    is_used = NIXL in names(vllm_config.kv_transfer_config)
    if is_used and (change := changed_signature("nixl", minor_release(vllm.__version__))):
        raise SettingsError(f"This vLLM has another {NIXL} than vllm-antkv knows: {change}.")


def _is_no_preset(kv_cache_dtype: str) -> bool:
    """Whether a cache dtype is vLLM's own business.

    Raises SettingsError for what was meant to be a preset: vLLM 0.32's parser names the choices, 0.33's takes any word.
    """
    if not kv_cache_dtype.strip().lower().startswith("antkv"):
        return True
    get_preset(kv_cache_dtype)
    return False


HOOK = Hook(
    name="config",
    why="plugins cannot validate or complete the configuration of a cache dtype",
    upstream="https://github.com/vllm-project/vllm/issues/51751",
    install=_install,
    superseded=lambda: bool(new_plugin_groups()),
)
