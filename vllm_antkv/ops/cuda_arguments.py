"""What the CUDA kernels alone are handed: Layer of csrc/cuda/layer.cuh, and the tables beside the pages."""

import ctypes
import importlib.resources
from typing import ClassVar

import torch

from vllm_antkv.cache.pages import ALIGNMENT
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.arguments import layer_fields, plain_tables, section_offset
from vllm_antkv.ops.c_structs import fields
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.fp8_tables import head_scales, in_e4m3
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rows import RowsArgument

#: The structures, and what they mean.
_HEADER = (importlib.resources.files("vllm_antkv.csrc") / "cuda" / "layer.cuh").read_text()


class LayerArgument(ctypes.Structure):
    """Layer of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = fields(_HEADER, "Layer")


class ResultsArgument(ctypes.Structure):
    """Results of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = fields(_HEADER, "Results", {"Rows": RowsArgument})


def tables_of(layer: LayerState, build: Build) -> dict[str, torch.Tensor]:
    """What the kernels read beside the pages, in their layouts."""
    tables = plain_tables(layer) | {"jensen_weights": layer.jensen_weights}
    packed = []
    for name, centroids, half_norms in zip("kv", (layer.k_centroids, layer.v_centroids), layer.half_norms, strict=True):
        entries = tables[f"{name}_centroids"] = centroids.half()
        tables[f"{name}_half_norms"] = half_norms
        if not build.stages_tables:
            scales = head_scales(centroids)[:, None].expand(-1, centroids.shape[1])
            tables[f"{name}_scales"] = scales
            entries = in_e4m3(centroids, scales[:, :, None, None])
        # In shared memory a row per code: csrc/cuda/staged_tables.cuh.
        rows = entries.transpose(1, 2).flatten(2) if build.stages_tables else entries.flatten(1, 2)
        if name == "v" and build.exchanges_words:
            # (..., half of the channels, quads, words of a quad, channels of a word)
            lower, upper = rows.unflatten(2, (2, -1, 2, 2)).unbind(2)
            rows = torch.cat((lower, upper.flip(3)), dim=2).flatten(2)
        packed.append(rows.contiguous().view(torch.uint8))
    tables["tables"] = torch.cat(packed, dim=2 if build.num_tables == 1 else 1)
    return tables


def layer_argument(layer: LayerState, tables: dict[str, torch.Tensor], build: Build, split: int) -> LayerArgument:
    """Addresses of a layer's pages and of its `tables_of`, which must live as long; `split` in tokens.

    Raises:
        ValueError: pages do not start at multiples of 16 bytes, as copies need.
    """
    common = layer_fields(layer, tables)
    for name in ("vq", "vq_block_stride", "vq_head_stride", "recency", "recency_block_stride", "recency_head_stride"):
        if common[name] % ALIGNMENT:
            raise ValueError(f"Pages must start at multiples of {ALIGNMENT} bytes, but {name} is {common[name]}.")
    return LayerArgument(
        **common,
        recency_scores=section_offset(layer.recency.k, layer.recency.scores),
        rotary_rows=0 if layer.rotary is None else len(layer.rotary.cos),
        split=split,
        staged_bytes=2 * VQ_BLOCK_SIZE * build.code_bytes + (anchor_bytes(layer) if build.staged_rows else 0),
        num_blocks=len(layer.vq.k_codes),
        score_slots=layer.recency.score_slots,
    )


def anchor_bytes(layer: LayerState) -> int:
    """Of a page: its anchors and their offsets, which lie behind the codes."""
    begin, offsets = 2 * VQ_BLOCK_SIZE * layer.vq.k_codes.shape[-1], layer.vq.anchor_offsets
    end = section_offset(layer.vq.k_codes, offsets) + offsets.shape[2] * offsets.shape[3] * offsets.itemsize
    return -(-(end - begin) // ALIGNMENT) * ALIGNMENT
