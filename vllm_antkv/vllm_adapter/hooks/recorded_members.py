"""The members of vLLM's classes that ours inherit from where pages are allocated (`configs/vllm_members.toml`).

A member that is new may decide which pages live, as `SlidingWindowSpec.num_retained_tokens` of 0.33 does: model runner
V2 sets to null what is below it, the intact prefix too. So the plugin stays inactive until somebody has looked at it.
"""

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Members:
    """Of one class of vLLM that one of ours derives from.

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
