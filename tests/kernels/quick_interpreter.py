"""Triton's interpreter without what it does in vain, which takes most of its time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType

import numpy as np
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
    # It makes types and shapes anew for every operation, which are few.
    interpreter._get_np_dtype = _once_for_each(interpreter._get_np_dtype)
    _remember_shapes()


def _once_for_each(numpy_dtype_of: Callable[[tl.dtype], np.dtype]) -> Callable[[tl.dtype], np.dtype]:
    found: dict[str, np.dtype] = {}

    def remembered(dtype: tl.dtype) -> np.dtype:
        if dtype.name not in found:
            found[dtype.name] = numpy_dtype_of(dtype)
        return found[dtype.name]

    return remembered


def _remember_shapes() -> None:
    types: dict[tuple[object, ...], dict[str, object]] = {}
    tensors: dict[str, dict[str, object]] = {}
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def init_type(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[int | tl.constexpr]) -> None:
        place = (element_ty.name, *(getattr(extent, "value", extent) for extent in shape))
        if place not in types:
            make_type(self, element_ty, shape)
            types[place] = vars(self).copy()
        vars(self).update(types[place])

    def init_tensor(self: tl.tensor, handle: object, type: tl.dtype) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name], handle=handle, type=type)

    tl.block_type.__init__ = init_type
    tl.tensor.__init__ = init_tensor
