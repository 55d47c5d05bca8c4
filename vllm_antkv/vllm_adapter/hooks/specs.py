"""Tells vLLM's block managers about recency pages."""

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST, KVCacheSpecRegistry

from vllm_antkv.vllm_adapter.block_pool.managers import RecencyManager
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec
from vllm_antkv.vllm_adapter.hooks.base import Hook, Patches


@dataclass(frozen=True)
class Members:
    """Of one class of vLLM that one of ours derives from where pages are allocated (`configs/vllm_members.toml`).

    A new member may decide which pages live, as `SlidingWindowSpec.num_retained_tokens` of 0.33 does: model runner V2
    sets to null what is below it, the intact prefix too. So the plugin stays inactive until somebody has looked at it.

    decided: what says which pages live, for how long, or how many are taken; ours overrides all of them.
    inherited: everything else.
    """

    decided: frozenset[str]
    inherited: frozenset[str]

    def unknown(self, parent: type) -> list[str]:
        """Members of the parent that nobody decided about."""
        public = {name for name in dir(parent) if not (name.startswith("__") and name.endswith("__"))}
        names = public | set(getattr(parent, "__dataclass_fields__", ()))
        # What every class with abstract methods, or every dataclass, has.
        return sorted(name for name in names - self.decided - self.inherited if not name.startswith("_abc_"))


_TABLES = tomllib.loads(files("vllm_antkv.configs").joinpath("vllm_members.toml").read_text(encoding="utf-8"))
#: SlidingWindowSpec, the parent of RecencySpec, and SingleTypeKVCacheManager, that of RecencyManager.
SPEC, MANAGER = (
    Members(**{kind: frozenset(names) for kind, names in _TABLES[parent].items()}) for parent in ("spec", "manager")
)


def _install(patches: Patches) -> None:
    # The built-in specs are registered on first use, and only if nothing is registered yet: let them go first.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(RecencySpec, RecencyManager, uniform_type_base_spec=RecencySpec)
    patches.on_undo(lambda: _REGISTRY_KVCACHESPEC_LIST.pop(RecencySpec))


def _missing() -> str | None:
    parents: tuple[tuple[type, Members], ...] = ((SlidingWindowSpec, SPEC), (SingleTypeKVCacheManager, MANAGER))
    for parent, members in parents:
        if unknown := members.unknown(parent):
            return f"{parent.__name__} has {', '.join(unknown)}, which may decide what is kept of a sequence"
    return None


def _verify() -> str | None:
    """Pages of another manager would be freed, or given, by another rule."""
    if _manager(RecencySpec) is not RecencyManager:
        return "recency pages have another manager"
    if None in (managers := {_manager(FullAttentionSpec), _manager(SlidingWindowSpec)}) or RecencyManager in managers:
        return "vLLM's own pages have lost their managers"
    return None


def _manager(spec: type[KVCacheSpec]) -> type[SingleTypeKVCacheManager] | None:
    # The registry goes by the class alone.
    return KVCacheSpecRegistry.get_manager_class(object.__new__(spec))


HOOK = Hook(
    name="specs",
    why="registering a KV cache spec before the built-in ones makes vLLM forget those",
    upstream="https://github.com/vllm-project/vllm/issues/42449",
    install=_install,
    missing=_missing,
    verify=_verify,
    superseded=lambda: not hasattr(KVCacheSpecRegistry, "_ensure_registered"),
)
