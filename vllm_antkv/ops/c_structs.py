"""Structures of a C header as ctypes has them: what kernels are handed is described once, in C."""

import ctypes
import importlib.resources
import re
from collections.abc import Mapping
from typing import Any

#: What the C++ and the CUDA kernels are handed.
HEADER = (importlib.resources.files("vllm_antkv.csrc") / "cpu" / "antkv.h").read_text()
_NUMBERS = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}
_NUMBERS |= {"i32": ctypes.c_int32, "i64": ctypes.c_int64}


def fields(
    header: str, name: str, structures: Mapping[str, type[ctypes.Structure]] | None = None
) -> list[tuple[str, Any]]:
    """Fields of the structure `name`, for `_fields_`.

    Args:
        header: C source; members are numbers, pointers and `structures`.
        structures: by the names that the header has for them.

    Raises:
        KeyError: a member is of another type.
    """
    code = re.sub(r"//.*", "", header)
    body = code.split(f"struct {name} {{")[1].split("};")[0]
    types: dict[str, Any] = {**_NUMBERS, **(structures or {})}
    pairs: list[tuple[str, Any]] = []
    for kind, members in re.findall(r"(?:const\s+)?(\w+)\b([^;]+);", body):
        for member in members.split(","):
            pairs.append((member.strip("* \n"), ctypes.c_void_p if "*" in member else types[kind]))
    return pairs
