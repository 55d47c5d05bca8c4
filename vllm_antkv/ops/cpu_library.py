"""The C interface of the kernels for CPUs (csrc/cpu/antkv.h): its structures, and a library with its functions."""

import ctypes
from pathlib import Path
from typing import ClassVar

from vllm_antkv.ops.arguments import RowsArgument
from vllm_antkv.ops.c_structs import HEADER, fields
from vllm_antkv.ops.step import StepArgument


class LayerArgument(ctypes.Structure):
    """antkv_layer of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_layer")


class WorkArgument(ctypes.Structure):
    """antkv_work of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_work", {"antkv_rows": RowsArgument})


class ClustersArgument(ctypes.Structure):
    """antkv_clusters of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_clusters")


def load(path: Path) -> ctypes.CDLL:
    """The kernels of a library.

    Raises:
        OSError, AttributeError: it does not load, or lacks a function.
    """
    library = ctypes.CDLL(str(path))
    library.antkv_sources.restype = ctypes.c_char_p
    layer, step, work = map(ctypes.POINTER, (LayerArgument, StepArgument, WorkArgument))
    library.antkv_run.argtypes = library.antkv_attend.argtypes = [layer, step, work]
    library.antkv_run.restype = ctypes.c_int64
    library.antkv_cluster.argtypes = [ctypes.POINTER(ClustersArgument)]
    library.antkv_attend.restype = library.antkv_cluster.restype = None
    return library
