"""Chooses the antkv attention backend for the antkv cache dtypes.

vLLM's platforms pick a backend from a fixed list; a plugin can register one, but not the dtypes it serves.
"""

import functools
from typing import Any

from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches, new_plugin_groups

_NAME = "ANTKV"
_PATH = "vllm_antkv.vllm_adapter.step.backend.AntKVBackend"


def _install(patches: Patches) -> None:
    member = AttentionBackendEnum.register(_NAME, _PATH)
    patches.on_undo(lambda: _forget(member))
    platform = type(current_platform)
    original = platform.get_attn_backend_cls.__func__

    @functools.wraps(original)
    def get_attn_backend_cls(cls: type, selected_backend: Any, attn_selector_config: Any, **kwargs: Any) -> str:
        if attn_selector_config.kv_cache_dtype not in PRESETS:
            return original(cls, selected_backend, attn_selector_config=attn_selector_config, **kwargs)
        _validate(attn_selector_config)
        return _PATH

    patches.set(platform, "get_attn_backend_cls", classmethod(get_attn_backend_cls))


def _forget(member: AttentionBackendEnum) -> None:
    """Take a member out of the enumeration, which has no method for that."""
    del AttentionBackendEnum._member_map_[member.name], AttentionBackendEnum._value2member_map_[member.value]
    AttentionBackendEnum._member_names_.remove(member.name)
    # Only what is no member any more can be deleted.
    delattr(AttentionBackendEnum, member.name)


def _validate(selector: Any) -> None:
    backend = AttentionBackendEnum[_NAME].get_class()
    capability = current_platform.get_device_capability() or DeviceCapability(0, 0)
    reasons = backend.validate_configuration(device_capability=capability, **selector._asdict())
    if reasons:
        raise UnsupportedModelError(
            f"{selector.kv_cache_dtype} cannot serve this model (head size {selector.head_size}): {', '.join(reasons)}."
        )


HOOK = Hook(
    name="backend",
    why="platforms choose the attention backend from a fixed list of dtypes",
    upstream="https://github.com/vllm-project/vllm/issues/51751",
    install=_install,
    superseded=lambda: bool(new_plugin_groups()),
)
