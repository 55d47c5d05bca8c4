"""Short launches of Triton's kernels.

Triton looks at every argument of every launch, to know which of the kernels that it has compiled is meant: about a
microsecond for each, and kernels here have fifty. Most of these are a layer's, and never change. So they are looked at
once, the others in short, and where all are alike the compiled kernel is called as Triton would call it.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton


class Fixed:
    """An argument that stays as it is from launch to launch: tensors that do not move, sizes.

    argument: as kernels declare it.
    key: what Triton may compile by, no coarser than it does; the same object wherever that is the same.
    values: what it hands over, addresses in place of tensors.

    Both are found where nobody gives them.
    """

    __slots__ = ("argument", "key", "values")

    def __init__(self, argument: Any, values: Any = None, key: tuple[Any, ...] = ()) -> None:
        if values is None:
            keys: list[Any] = []
            values = _flattened(argument, keys)
            key = tuple(keys)
        self.argument, self.values = argument, values
        self.key = _keys.setdefault(key, object())


#: To compare them takes longer than all else here.
_keys: dict[tuple[Any, ...], object] = {}
#: By address, as Triton's own hash of a kernel takes long: the kernel, arguments whose type alone Triton looks at, and
#: what it made, by all that decides which of its compilations is meant.
_kernels: dict[int, tuple[Any, frozenset[int], dict[tuple[Any, ...], Any]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """As `kernel[grid](*arguments, **constants)`.

    Args:
        kernel: of `triton.jit`.
        arguments: all that are no constants, in order; `Fixed` ones stand for what is in them.
        constants: compiled in, and options of the compiler.
    """
    _, unspecialised, compiled = _kernels.get(id(kernel)) or _first_seen(kernel)
    keys: list[Any] = [*constants.values()]
    values: list[Any] = []
    for index, argument in enumerate(arguments):
        kind = type(argument)
        if kind is Fixed:
            keys.append(argument.key)
            values.append(argument.values)
        elif index in unspecialised:
            keys.append(kind)
            values.append(argument)
        else:
            values.append(_flattened(argument, keys))
    known = compiled.get(tuple(keys))
    if known is None:
        plain = [argument.argument if type(argument) is Fixed else argument for argument in arguments]
        made = kernel[grid](*plain, **constants)
        if hasattr(made, "packed_metadata"):
            # Not under the interpreter.
            rest = [constants[name] for name in kernel.arg_names[len(arguments) :]]
            compiled[tuple(keys)] = made, made.run, made.function, made.packed_metadata, rest
        return
    made, run, function, metadata, rest = known
    driver = triton.runtime.driver.active
    stream = driver.get_current_stream(driver.get_current_device())
    enter, leave = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    launched = None
    if enter.calls or leave.calls:
        launched = made.launch_metadata(grid, stream, *values, *rest)
    else:
        # Nobody watches.
        enter = leave = None
    run(*(*grid, 1, 1)[:3], stream, function, metadata, launched, enter, leave, *values, *rest)


def autotuned(configs: list[triton.Config], key: list[str]) -> Callable[[Any], Any]:
    """Decorate a kernel: the fastest of `configs` for each value of the arguments `key`.

    The kernel may run several times on the same arguments, so it must only write what it does not read. The first
    configuration is the default: it is what runs under Triton's interpreter, which has nothing to measure.
    """
    if triton.knobs.runtime.interpret:
        configs = configs[:1]
    return triton.autotune(configs=configs, key=key, cache_results=True)


def _first_seen(kernel: Any) -> tuple[Any, frozenset[int], dict[tuple[Any, ...], Any]]:
    parameters = enumerate(getattr(kernel, "params", ()))
    unspecialised = frozenset(index for index, parameter in parameters if parameter.do_not_specialize)
    return _kernels.setdefault(id(kernel), (kernel, unspecialised, {}))


def _flattened(argument: Any, keys: list[Any]) -> Any:
    """What `Fixed` has as values; adds to what it has as a key."""
    kind = type(argument)
    if kind is torch.Tensor or isinstance(argument, torch.Tensor):
        address = argument.data_ptr()
        keys += (argument.dtype, address & 15)
        return address
    if kind is int:
        keys += (argument == 1, argument & 15, -(1 << 31) <= argument < 1 << 31)
        return argument
    if isinstance(argument, tuple):
        keys.append(len(argument))
        return tuple([_flattened(each, keys) for each in argument])
    keys += (kind, argument if kind is bool else None)
    return argument
