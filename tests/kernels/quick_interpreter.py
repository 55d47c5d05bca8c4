"""Triton's interpreter without what it does in vain, which takes most of its time."""

from dataclasses import replace
from types import FunctionType

import triton.language as tl
from triton.runtime import interpreter


def quicken(function: FunctionType) -> None:
    """For the rest of this process, which runs interpreted kernels alone.

    function: of any kernel, as Python has it.
    """
    # It puts its own operations into `triton.language` for every launch, and again for every call of one function by
    # another. Here they are put there once, for functions of kernels and for those of `triton.language` itself.
    for of in (function, tl.max.fn):
        interpreter._patch_lang(of)
    interpreter._patch_lang = lambda of: interpreter._LangPatchScope()
    # It computes every sum and product of integers again in 64 bits, for an assertion that is made with `debug` alone.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
