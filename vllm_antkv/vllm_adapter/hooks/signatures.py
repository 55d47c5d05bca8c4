"""Compares what the hooks wrap, override and call of vLLM with what it looked like when they were written.

A parameter that was added, renamed or given another default may mean something else than we think, although the name is
still there.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from vllm_antkv.vllm_adapter.hooks.recorded_signatures import RECORDED


def changed_signature(hook: str, release: str | None) -> str | None:
    """The first function that this vLLM lacks, or that takes other arguments than recorded for a release, or None."""
    for owner, functions in RECORDED[hook].items():
        for name, recorded in functions.items():
            expected = recorded.get(release or "") if isinstance(recorded, Mapping) else recorded
            found = parameters(owner, name)
            if expected is not None and found != expected:
                return f"{owner}.{name} {f'takes {found}, not {expected}' if found else 'is not there'}"
    return None


def parameters(owner: str, name: str) -> str | None:
    """Of a function of "module" or "module:Class", without annotations, as "(self, name, other=None)"; None: no such.

    Of a function that a hook has wrapped, those of vLLM's own.
    """
    module, _, path = owner.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in filter(None, [*path.split("."), name]):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return _plain(found)


def _plain(function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
