"""What the C++ and the CUDA kernels are handed alike: addresses of a layer's pages, of a step and of its rows."""

import ctypes
from typing import ClassVar

import torch

from vllm_antkv.ops.c_structs import HEADER, fields
from vllm_antkv.ops.layer import LayerState


class RowsArgument(ctypes.Structure):
    """antkv_rows of csrc/cpu/antkv.h, Rows of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = fields(HEADER, "antkv_rows")


def layer_fields(layer: LayerState, tables: dict[str, torch.Tensor]) -> dict[str, int | float]:
    """What antkv_layer and Layer have in common, by name: pages and `tables`, which must live as long, and sizes."""
    vq, recency, rotary = layer.vq, layer.recency, layer.rotary
    addresses: dict[str, int | float] = {name: tensor.data_ptr() for name, tensor in tables.items()}
    return addresses | {
        "vq": vq.k_codes.data_ptr(),
        "vq_block_stride": _stride(vq.k_codes, 0),
        "vq_head_stride": _stride(vq.k_codes, 1),
        "v_codes": section_offset(vq.k_codes, vq.v_codes),
        "k_anchors": section_offset(vq.k_codes, vq.k_anchors),
        "v_anchors": section_offset(vq.k_codes, vq.v_anchors),
        "anchor_offsets": section_offset(vq.k_codes, vq.anchor_offsets),
        "recency": recency.k.data_ptr(),
        "recency_block_stride": _stride(recency.k, 0),
        "recency_head_stride": _stride(recency.k, 1),
        "recency_v": section_offset(recency.k, recency.v),
        "missing_rows": layer.counters.missing_rows.data_ptr(),
        "scale": layer.rules.scale,
        "rotary_magnitude": 1.0 if rotary is None else float(rotary.cos[0, 0]),
        "num_kv_heads": layer.k_centroids.shape[0],
        "rotary_dim": 0 if rotary is None else rotary.rotary_dim,
        "is_neox_style": rotary is None or rotary.is_neox_style,
        "recency_block_size": recency.k.shape[2],
        "anchor_rows": vq.k_anchors.shape[2],
    }


def plain_tables(layer: LayerState) -> dict[str, torch.Tensor]:
    """The tables beside the centroids that both read as they are; a missing one is a null pointer."""
    tables = {"last_query": layer.last_query}
    if layer.rotary is not None:
        tables |= {"cos": layer.rotary.cos, "sin": layer.rotary.sin}
    if layer.k_order is not None:
        tables["k_order"] = layer.k_order
    return tables


def section_offset(first: torch.Tensor, section: torch.Tensor) -> int:
    """Bytes from the first section of a page to another."""
    # Of the place in their storage: a section without bytes has no address.
    first_byte, byte = (int(tensor.storage_offset()) * tensor.itemsize for tensor in (first, section))
    return byte - first_byte


def rows_argument(rows: torch.Tensor) -> RowsArgument:
    """(num_tokens, heads, head_size) whose heads lie side by side, as they come from one projection.

    Raises:
        ValueError: they do not; the kernels would read other rows.
    """
    check_heads(rows)
    return RowsArgument(rows.data_ptr(), rows.stride(0))


def check_heads(rows: torch.Tensor) -> None:
    """(num_tokens, heads, head_size): kernels take the heads of a token to lie side by side; ValueError where not."""
    _, num_heads, head_size = rows.shape
    strides = rows.stride()
    if strides[2] != 1 or (num_heads > 1 and strides[1] != head_size):
        raise ValueError(f"The heads of a token must be contiguous, not of strides {strides}.")


def _stride(pages: torch.Tensor, dim: int) -> int:
    return pages.stride(dim) * pages.itemsize
