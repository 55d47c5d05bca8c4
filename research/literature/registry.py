"""All methods that can be compared, and what goes on top of one: the tables that the command, tests and docs read.

A name is that of a method, or of a method and what is laid on top of it: `rtn-2bit+pfn-5`.
"""

import re
from collections.abc import Callable
from dataclasses import replace

from research.literature import (
    fp8,
    h2o,
    intactkv,
    kivi,
    kvquant,
    kvsink,
    logquant,
    preserve_first,
    rtn,
    skvq,
    streamingllm,
    tasq,
    turboquant,
)
from research.literature.method import LiteratureMethod
from research.literature.prompt_anchors import attend_by_prompt
from research.literature.request import LiteratureRequest
from vllm_antkv.errors import SettingsError
from vllm_antkv.evaluate import methods as ours
from vllm_antkv.evaluate.methods import antkv
from vllm_antkv.offline.method import Method

_MODULES = (fp8, rtn, kivi, kvquant, turboquant, skvq, logquant, tasq, streamingllm, h2o)

#: Name of a method -> what builds it.
METHODS: dict[str, Callable[[str, LiteratureRequest], Method]] = {
    **ours.METHODS,
    **{name: module.build for module in _MODULES for name in module.NAMES},
}

#: Name of what goes on top of a method, written `+NAME-N` -> what lays it there.
ADDITIONS: dict[str, Callable[[Method, int, LiteratureRequest], Method]] = {
    module.NAME: module.apply for module in (preserve_first, kvsink, intactkv)
}


def check_method(name: str) -> str:
    """`name` itself; SettingsError names the known methods when it is none of them."""
    base, *additions = name.split("+")
    if base not in METHODS:
        raise SettingsError(f"Unknown method '{base}': choose among {', '.join(METHODS)}.")
    for addition in additions:
        if _parse(addition) is None:
            known = ", ".join(f"+{known}-N" for known in ADDITIONS)
            raise SettingsError(f"Unknown addition '+{addition}' to a method: choose among {known}, N from 1 to 9999.")
    return name


def build_method(name: str, request: LiteratureRequest) -> Method:
    """The method called `name`.

    Raises SettingsError when there is none, CodebookError when it needs a codebook that is missing or does not fit.
    """
    base, *additions = check_method(name).split("+")
    method = METHODS[base](base, request)
    if base in antkv.NAMES and request.anchor_scope == "prompt":
        provenance = {**(method.provenance or {}), "anchor_scope": "prompt"}
        method = replace(method, attention=attend_by_prompt, provenance=provenance)
    for addition in additions:
        match = _parse(addition)
        assert match is not None
        quantises = isinstance(method, LiteratureMethod) and method.retention is not None
        if not quantises and (match[1] != intactkv.NAME or base not in antkv.NAMES):
            raise SettingsError(
                f"Nothing can be laid on top of {base}: antkv-* have --prefix and --sinks of their own, and take "
                f"+{intactkv.NAME}-N alone."
            )
        method = ADDITIONS[match[1]](method, int(match[2]), request)
    return method


def _parse(addition: str) -> re.Match[str] | None:
    return re.fullmatch(rf"({'|'.join(ADDITIONS)})-([1-9][0-9]{{0,3}})", addition)
