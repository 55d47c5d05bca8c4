"""What the C++ and the CUDA kernels are handed alike of a layer: addresses of its pages and tables."""

import torch

from vllm_antkv.ops.layer import LayerState


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


def _stride(pages: torch.Tensor, dim: int) -> int:
    return pages.stride(dim) * pages.itemsize
