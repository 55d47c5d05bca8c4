"""Compares what the hooks wrap, override and call of vLLM with what it looked like when they were written.

A parameter that was added, renamed or given another default may mean something else than we think, although the name is
still there. `configs/vllm_signatures.toml` has what it looked like.
"""

import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

#: By hook, class or module, and function.
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
