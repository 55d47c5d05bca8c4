"""What a hook is: one touch on vLLM's internals, with its reason and its end."""

import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from vllm_antkv.releases import minor_release, not_supported

#: By hook, class or module, and function, what the hooks wrap, override and call of vLLM, as when they were written. A
#: parameter that was added, renamed or given another default may mean something else, although the name is still there.
RECORDED: dict[str, dict[str, dict[str, str | dict[str, str]]]] = tomllib.loads(
    files("vllm_antkv.configs").joinpath("vllm_signatures.toml").read_text(encoding="utf-8")
)


def changed_signature(hook: str, release: str | None) -> str | None:
    """The first function that this vLLM lacks, or that takes other arguments than recorded for a release, or None."""
    for owner, functions in RECORDED[hook].items():
        for name, recorded in functions.items():
            expected = recorded.get(release or "") if isinstance(recorded, Mapping) else recorded
            actual = parameters(owner, name)
            if expected is not None and actual != expected:
                return f"{owner}.{name} {f'takes {actual}, not {expected}' if actual else 'is not there'}"
    return None


def parameters(owner: str, name: str) -> str | None:
    """Of a function of "module" or "module:Class", without annotations, as "(self, name, other=None)"; None: no such.

    Of a function that a hook has wrapped, those of vLLM's own.
    """
    module, _, path = owner.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in filter(None, [*path.split("."), name]):
            function = getattr(function, part)
    except (ImportError, AttributeError):
        return None
    return _plain(function)


def _plain(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


class Patches:
    """What the hooks changed.

    A plugin of which one hook turns out not to work must leave vLLM as it was, not with half of its hooks on.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a class or a module."""
        was_there, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, value)
        # What was inherited is inherited again.
        self.on_undo(lambda: setattr(owner, name, before) if was_there else delattr(owner, name))

    def on_undo(self, undo: Callable[[], object]) -> None:
        """Remember how to take back what was just done."""
        self._undo.append(undo)

    def undo(self) -> None:
        """Take everything back, the last change first."""
        while self._undo:
            self._undo.pop()()


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Hook:
    """One touch on vLLM.

    name: of its file.
    why: what vLLM lacks, in one sentence.
    upstream: the thread that would make it unnecessary.
    install: applies it.
    superseded: True once vLLM itself offers what the hook adds; a test fails then.
    missing: what of vLLM's internals is not as this hook expects it, beside what `RECORDED` has, or None.
    verify: asked once all hooks are installed: what vLLM does not do that it should do by now, or None. For what would
        otherwise be wrong without an error.
    """

    name: str
    why: str
    upstream: str
    install: Callable[[Patches], None]
    superseded: Callable[[], bool]
    missing: Callable[[], str | None] = _nothing
    verify: Callable[[], str | None] = _nothing

    def applies(self) -> str | None:
        """None when the hook fits this vLLM, else the reason why not."""
        import vllm

        version = vllm.__version__
        return not_supported(version) or changed_signature(self.name, minor_release(version)) or self.missing()


#: vLLM's plugin groups in the supported releases; none of them covers what the hooks do.
_KNOWN_PLUGIN_GROUPS = {
    "DEFAULT_PLUGINS_GROUP",
    "IO_PROCESSOR_PLUGINS_GROUP",
    "PLATFORM_PLUGINS_GROUP",
    "STAT_LOGGER_PLUGINS_GROUP",
    "ENDPOINT_PLUGINS_GROUP",
}


def new_plugin_groups() -> set[str]:
    """Kinds of plugins that this vLLM has and the supported releases had not: one of them may do what a hook does."""
    import vllm.plugins

    return {name for name in vars(vllm.plugins) if name.endswith("_PLUGINS_GROUP")} - _KNOWN_PLUGIN_GROUPS


def missing_attributes(owner: object, *names: str) -> str | None:
    """The first attribute that `owner` lacks, as a reason, or None."""
    for name in names:
        if not hasattr(owner, name):
            return f"{getattr(owner, '__name__', owner)} has no {name}"
    return None
