"""What the CUDA kernels are handed: the structures of csrc/cuda/layer.cuh, and the tables beside the pages."""

import ctypes
from functools import lru_cache
from typing import ClassVar

import torch

from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.step import Step

#: Largest e4m3 number.
_FP8_MAX = 448.0


class LayerArgument(ctypes.Structure):
    """Layer of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = [
        ("vq", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vq_block_stride", "vq_head_stride")),
        *((name, ctypes.c_int64) for name in ("v_codes", "k_anchors", "v_anchors", "anchor_offsets")),
        ("recency", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("recency_block_stride", "recency_head_stride", "recency_v")),
        *((name, ctypes.c_void_p) for name in ("k_centroids", "v_centroids", "k_half_norms", "v_half_norms")),
        *((name, ctypes.c_void_p) for name in ("tables", "k_scales", "v_scales", "cos", "sin", "last_query")),
        *((name, ctypes.c_float) for name in ("scale", "rotary_magnitude")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "rotary_dim", "is_neox_style", "rotary_rows")),
        *((name, ctypes.c_int32) for name in ("recency_block_size", "anchor_rows", "split", "unused")),
    ]


class StepArgument(ctypes.Structure):
    """Step."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "vq_table", "recency_table")),
        *((name, ctypes.c_int64) for name in ("vq_stride", "recency_stride", "num_reqs")),
    ]


class RowsArgument(ctypes.Structure):
    """Rows."""

    _fields_: ClassVar = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


def tables_of(layer: LayerState, build: Build) -> dict[str, torch.Tensor]:
    """What the kernels read beside the pages, in their layouts."""
    tables = {"last_query": layer.last_query}
    columns = []
    for name, centroids in (("k", layer.k_centroids), ("v", layer.v_centroids)):
        tables[f"{name}_centroids"] = centroids.half()
        tables[f"{name}_half_norms"] = centroids.float().square().sum(-1) / 2
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
    if layer.rotary is not None:
        tables |= {"cos": layer.rotary.cos, "sin": layer.rotary.sin}
    return tables


def _power_of_two_scales(centroids: torch.Tensor, shared_by_halves: bool) -> torch.Tensor:
    """(num_kv_heads, num_sub_vectors) float32. e4m3 has an exponent of its own: finer scales would gain nothing."""
    largest = centroids.float().abs().amax((2, 3)).clamp(min=1e-6)
    if shared_by_halves:
        halves = largest.unflatten(1, (2, -1)).amax(1, keepdim=True)
        largest = halves.expand(-1, 2, -1).flatten(1)
    return torch.exp2(torch.ceil(torch.log2(largest / _FP8_MAX)))


def layer_argument(layer: LayerState, tables: dict[str, torch.Tensor], split: int) -> LayerArgument:
    """Addresses of a layer's pages and of its `tables_of`, which must live as long; `split` in tokens."""
    vq, recency, rotary = layer.vq, layer.recency, layer.rotary
    return LayerArgument(
        vq=vq.k_codes.data_ptr(),
        vq_block_stride=_stride(vq.k_codes, 0),
        vq_head_stride=_stride(vq.k_codes, 1),
        v_codes=_section(vq.k_codes, vq.v_codes),
        k_anchors=_section(vq.k_codes, vq.k_anchors),
        v_anchors=_section(vq.k_codes, vq.v_anchors),
        anchor_offsets=_section(vq.k_codes, vq.anchor_offsets),
        recency=recency.k.data_ptr(),
        recency_block_stride=_stride(recency.k, 0),
        recency_head_stride=_stride(recency.k, 1),
        recency_v=_section(recency.k, recency.v),
        **{name: tensor.data_ptr() for name, tensor in tables.items()},
        scale=layer.scale,
        rotary_magnitude=1.0 if rotary is None else float(rotary.cos[0, 0]),
        num_kv_heads=layer.k_centroids.shape[0],
        rotary_dim=0 if rotary is None else rotary.rotary_dim,
        is_neox_style=rotary is None or rotary.is_neox_style,
        rotary_rows=0 if rotary is None else len(rotary.cos),
        recency_block_size=recency.k.shape[2],
        anchor_rows=vq.k_anchors.shape[2],
        split=split,
    )


@lru_cache(maxsize=1)
def step_argument(step: Step) -> StepArgument:
    """All layers of a model and their operations are given the same step."""
    return StepArgument(
        step.query_start_loc.data_ptr(),
        step.seq_lens.data_ptr(),
        step.vq_block_table.data_ptr(),
        step.recency_block_table.data_ptr(),
        step.vq_block_table.stride(0),
        step.recency_block_table.stride(0),
        step.num_reqs,
    )


def rows_argument(rows: torch.Tensor) -> RowsArgument:
    """(num_tokens, heads, head_size) whose heads lie side by side, as they come from one projection."""
    return RowsArgument(rows.data_ptr(), rows.stride(0))


def _stride(pages: torch.Tensor, dim: int) -> int:
    return pages.stride(dim) * pages.itemsize


def _section(first: torch.Tensor, section: torch.Tensor) -> int:
    return section.data_ptr() - first.data_ptr()
