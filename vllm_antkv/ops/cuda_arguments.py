"""What the CUDA kernels alone are handed: Layer of csrc/cuda/layer.cuh, and the tables beside the pages."""

import ctypes
from typing import ClassVar

import torch

from vllm_antkv.cache.pages import ALIGNMENT
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.arguments import RowsArgument, layer_fields, plain_tables, section_offset
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.layer import LayerState

#: Largest e4m3 number.
_FP8_MAX = 448.0


class LayerArgument(ctypes.Structure):
    """Layer of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = [
        ("vq", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vq_block_stride", "vq_head_stride")),
        *((name, ctypes.c_int64) for name in ("v_codes", "k_anchors", "v_anchors", "anchor_offsets")),
        ("recency", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("recency_block_stride", "recency_head_stride")),
        *((name, ctypes.c_int64) for name in ("recency_v", "recency_scores")),
        *((name, ctypes.c_void_p) for name in ("k_centroids", "v_centroids", "k_half_norms", "v_half_norms")),
        *((name, ctypes.c_void_p) for name in ("tables", "k_scales", "v_scales", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("k_order", "last_query")),
        *((name, ctypes.c_float) for name in ("scale", "rotary_magnitude")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "rotary_dim", "is_neox_style", "rotary_rows")),
        *((name, ctypes.c_int32) for name in ("recency_block_size", "anchor_rows", "split", "staged_bytes")),
        ("num_blocks", ctypes.c_int32),
    ]


class ResultsArgument(ctypes.Structure):
    """Results of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = [
        ("output", RowsArgument),
        *((name, ctypes.c_void_p) for name in ("lse", "partials", "places")),
        ("capacity", ctypes.c_int64),
        ("is_sink", ctypes.c_void_p),
        ("votes", ctypes.c_int32),
    ]


def tables_of(layer: LayerState, build: Build) -> dict[str, torch.Tensor]:
    """What the kernels read beside the pages, in their layouts."""
    tables = plain_tables(layer)
    columns = []
    for name, centroids, half_norms in zip("kv", (layer.k_centroids, layer.v_centroids), layer.half_norms, strict=True):
        tables[f"{name}_centroids"] = centroids.half()
        tables[f"{name}_half_norms"] = half_norms
        if not build.stages_tables:
            continue
        entries = centroids.half()
        if build.fp8:
            # The channels of a rotary pair share their scale, so that it can ride on the cosines.
            scales = _power_of_two_scales(centroids, shared_by_halves=name == "k")
            tables[f"{name}_scales"] = scales
            entries = (centroids.float() / scales[:, :, None, None]).to(torch.float8_e4m3fn)
        # A row per code: csrc/cuda/staged_tables.cuh.
        rows = entries.transpose(1, 2).flatten(2)
        columns.append(rows.contiguous().view(torch.uint8))
    if columns:
        tables["tables"] = torch.cat(columns, dim=1 if build.num_tables == 2 else 2)
    return tables


def _power_of_two_scales(centroids: torch.Tensor, shared_by_halves: bool) -> torch.Tensor:
    """(num_kv_heads, num_sub_vectors) float32. e4m3 has an exponent of its own: finer scales would gain nothing."""
    largest = centroids.float().abs().amax((2, 3)).clamp(min=1e-6)
    if shared_by_halves:
        halves = largest.unflatten(1, (2, -1)).amax(1, keepdim=True)
        largest = halves.expand(-1, 2, -1).flatten(1)
    return torch.exp2(torch.ceil(torch.log2(largest / _FP8_MAX)))


def layer_argument(layer: LayerState, tables: dict[str, torch.Tensor], build: Build, split: int) -> LayerArgument:
    """Addresses of a layer's pages and of its `tables_of`, which must live as long; `split` in tokens.

    Raises:
        ValueError: pages do not start at multiples of 16 bytes, as copies need.
    """
    fields = layer_fields(layer, tables)
    for name in ("vq", "vq_block_stride", "vq_head_stride", "recency", "recency_block_stride", "recency_head_stride"):
        if fields[name] % ALIGNMENT:
            raise ValueError(f"Pages must start at multiples of {ALIGNMENT} bytes, but {name} is {fields[name]}.")
    return LayerArgument(
        **fields,
        recency_scores=section_offset(layer.recency.k, layer.recency.scores),
        rotary_rows=0 if layer.rotary is None else len(layer.rotary.cos),
        split=split,
        staged_bytes=_staged_bytes(layer, build),
        num_blocks=len(layer.vq.k_codes),
    )


def _staged_bytes(layer: LayerState, build: Build) -> int:
    """Of a page: with its anchors, where a span has room for them."""
    codes = 2 * VQ_BLOCK_SIZE * build.code_bytes
    offsets = layer.vq.anchor_offsets
    end = section_offset(layer.vq.k_codes, offsets) + offsets.shape[2] * offsets.shape[3] * offsets.itemsize
    content = -(-end // ALIGNMENT) * ALIGNMENT
    return content if content - codes <= build.staged_anchor_bytes else codes
