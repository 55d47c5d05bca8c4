"""The C interface of the kernels for CPUs (csrc/cpu/antkv.h): its structures, and a library with its functions."""

import ctypes
from pathlib import Path
from typing import ClassVar

from vllm_antkv.ops.arguments import RowsArgument, StepArgument
from vllm_antkv.ops.counters import Timing


class LayerArgument(ctypes.Structure):
    """antkv_layer of csrc/cpu/antkv.h."""

    _fields_: ClassVar = [
        ("vq", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vq_block_stride", "vq_head_stride")),
        *((name, ctypes.c_int64) for name in ("v_codes", "k_anchors", "v_anchors", "anchor_offsets")),
        ("recency", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("recency_block_stride", "recency_head_stride")),
        *((name, ctypes.c_int64) for name in ("recency_v", "recency_scores")),
        *((name, ctypes.c_void_p) for name in ("k_centroids", "v_centroids", "v_bfloat16")),
        *((name, ctypes.c_void_p) for name in ("k_fixed", "fixed_angles", "k_units", "k_columns", "v_columns")),
        *((name, ctypes.c_void_p) for name in ("k_half_norms", "v_half_norms", "k_bytes", "v_bytes")),
        *((name, ctypes.c_void_p) for name in ("k_middles", "v_middles", "k_limits", "v_limits", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("k_order", "last_query", "sinks", "positions", "sections")),
        ("position_stride", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap", "rotary_magnitude")),
        *((name, ctypes.c_int32) for name in ("dtype", "num_heads", "num_kv_heads", "head_size")),
        *((name, ctypes.c_int32) for name in ("rotary_dim", "is_neox_style")),
        *((name, ctypes.c_int32) for name in ("sub_vector_size", "num_centroids", "code_bytes")),
        *((name, ctypes.c_int32) for name in ("recency_block_size", "anchor_rows", "prefix")),
        *((name, ctypes.c_int32) for name in ("has_anchors", "exact_anchors", "prompt_scope")),
        *((name, ctypes.c_int32) for name in ("prefill_reads_cache", "window", "tiles")),
    ]


class WorkArgument(ctypes.Structure):
    """antkv_work of csrc/cpu/antkv.h."""

    _fields_: ClassVar = [
        *((name, RowsArgument) for name in ("query", "key", "value", "output")),
        *((name, ctypes.c_void_p) for name in ("is_sink", "is_prefilling")),
        ("timings", ctypes.POINTER(Timing)),
    ]


def load(path: Path) -> ctypes.CDLL:
    """The kernels of a library.

    Raises:
        OSError, AttributeError: it does not load, or lacks a function.
    """
    library = ctypes.CDLL(str(path))
    library.antkv_sources.restype = ctypes.c_char_p
    pointer, layer, step = ctypes.c_void_p, ctypes.POINTER(LayerArgument), ctypes.POINTER(StepArgument)
    library.antkv_run.argtypes = [layer, step, ctypes.POINTER(WorkArgument)]
    library.antkv_run.restype = ctypes.c_int64
    library.antkv_encode_store.argtypes = [layer, step, RowsArgument, RowsArgument]
    library.antkv_encode_store.restype = None
    library.antkv_anchor_score.argtypes = [layer, step, RowsArgument, RowsArgument, RowsArgument, pointer, pointer]
    library.antkv_anchor_score.restype = ctypes.c_int64
    library.antkv_attend.argtypes = [
        layer,
        step,
        RowsArgument,
        RowsArgument,
        RowsArgument,
        RowsArgument,
        pointer,
        pointer,
    ]
    library.antkv_attend.restype = None
    return library
