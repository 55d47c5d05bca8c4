"""The operations through Triton kernels: the portable path of GPUs. Nothing here waits for the device."""

import torch
import triton

from vllm_antkv.cache.pages import ALIGNMENT
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rope import angles_are_linear
from vllm_antkv.ops.rows import StepRows, token_stride
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen import Attended, PlainRows, VarlenPrefill, dequantised_sizes, prefill_limits
from vllm_antkv.ops.varlen_call import StepPages
from vllm_antkv.select.anchors import EXACT_ANCHOR, VOTE_PRIOR
from vllm_antkv.select.recency import exact_bounds
from vllm_antkv.triton_kernels.anchor_score import anchor_score
from vllm_antkv.triton_kernels.arguments import Layer, Policy, Shape
from vllm_antkv.triton_kernels.close_blocks import close_blocks
from vllm_antkv.triton_kernels.decode import decode
from vllm_antkv.triton_kernels.dequantised_pages import write_dequantised_pages
from vllm_antkv.triton_kernels.encode_store import encode_store
from vllm_antkv.triton_kernels.launch import Fixed
from vllm_antkv.triton_kernels.merge_calls import merge_calls
from vllm_antkv.triton_kernels.prefill import prefill

#: Programs that fill a large GPU: 132 multiprocessors with four programs each.
_ENOUGH_PROGRAMS = 512
#: Keys below which a split costs more than it saves.
_MIN_SPLIT = 256
_MAX_SPLITS = 64


class TritonOperations:
    """See `LayerOperations`.

    decodes: `attend` decodes, which needs scratch; other kernels may do it.
    """

    def __init__(self, layer: LayerState, decodes: bool = True) -> None:
        self._layer = layer
        self._shape = _shape(layer)
        self._handed = Fixed(_handed(layer))
        self._policy = Policy(
            anchors=layer.config.anchor_share > 0, exact=layer.config.anchor_dtype == "model", vote_prior=VOTE_PRIOR
        )
        self._varlen = None
        if prefill_limits(layer, layer.recency.score_slots) is not None:
            self._varlen = VarlenPrefill(layer, self._write_dequantised_pages, self._merge)
        if decodes:
            self._reserve()

    def run(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`."""
        self.encode_store(rows, step)
        if self._layer.config.anchor_rows:
            self.anchor_score(rows, step)
        self.attend(rows, output, step)

    def encode_store(self, rows: StepRows, step: StepPlan) -> None:
        """See `ReferenceOperations`."""
        encode_store(rows.handed, self._handed, step.batch, self._shape)

    def anchor_score(self, rows: StepRows, step: StepPlan, singles: bool = True) -> None:
        """See `ReferenceOperations`."""
        anchor_score(
            rows.handed,
            rows.is_sink,
            self._layer.config.prefix,
            self._count(),
            self._handed,
            step.batch,
            self._shape,
            self._policy,
            self._layer.rules.scale,
            singles,
        )

    def close_blocks(self, rows: StepRows, step: StepPlan) -> None:
        """See `ReferenceOperations`."""
        close_blocks(
            rows.handed, self._layer.config.prefix, self._count(), self._handed, step.batch, self._shape, self._policy
        )

    def _count(self) -> torch.Tensor | None:
        layer = self._layer
        return layer.counters.anchor_rows(2 * self._shape.num_kv_heads) if layer.counts_rows else None

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan, fewest: int = 1) -> None:
        """See `ReferenceOperations`."""
        # Raises where kernels would write between heads.
        token_stride(output)
        if step.max_query_len > self._shape.score_slots:
            self._prefill(rows, output, step)
        if max(fewest, step.min_query_len) > self._shape.score_slots:
            return
        partial_output, partial_lse = self._partials(step.num_reqs, step.max_seq_len)
        decode(
            rows.handed,
            output,
            partial_output,
            partial_lse,
            self._handed,
            step.batch,
            self._shape,
            self._layer.rules.scale,
        )

    def _prefill(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """Attend from the requests with more new tokens; rows of the others are left alone or hold anything."""
        if self._varlen is not None and step.rounds is not None:
            self._varlen.attend(rows, output, step)
        else:
            scale = self._layer.rules.scale
            prefill(rows.handed, output, self._handed, step.batch, self._shape, scale)

    def _write_dequantised_pages(
        self, rows: StepRows, plain: PlainRows, pages: StepPages, extends: bool, step: StepPlan
    ) -> None:
        """See `ops.varlen.DequantisedPageWriter`."""
        write_dequantised_pages(
            rows.handed,
            plain.handed,
            pages.handed,
            extends,
            self._handed,
            step.batch,
            self._shape,
            self._layer.rules.scale,
        )

    def _merge(self, so_far: Attended, added: Attended, is_first: bool) -> None:
        """See `ops.varlen.Merge`."""
        merge_calls(*so_far, *added, is_first)

    def _reserve(self) -> None:
        """Take as much scratch as any step will."""
        longest = len(self._layer.last_query)
        batches = range(1, self._layer.max_num_reqs + 1)
        self._partials(max(batches, key=lambda num_reqs: num_reqs * self._num_splits(num_reqs, longest)), longest)

    def _partials(self, num_reqs: int, max_seq_len: int) -> list[torch.Tensor]:
        """Scratch of `decode`: what the splits leave to be merged, and its log-sum-exp."""
        num_splits = self._num_splits(num_reqs, max_seq_len)
        sizes = (num_reqs, self._shape.score_slots, self._layer.num_heads, num_splits)
        return self._layer.scratch(((*sizes, self._shape.head_size), torch.float32), (sizes, torch.float32))

    def _num_splits(self, num_reqs: int, max_seq_len: int) -> int:
        """A power of two, from what the host knows; steps replayed from a CUDA graph have the graph's."""
        wanted = _ENOUGH_PROGRAMS // (num_reqs * self._shape.num_kv_heads)
        useful = max_seq_len // _MIN_SPLIT
        return 1 << (max(min(wanted, useful, _MAX_SPLITS), 1).bit_length() - 1)


def _shape(layer: LayerState) -> Shape:
    num_kv_heads, num_sub_vectors, num_centroids, size = layer.k_centroids.shape
    head_size = num_sub_vectors * size
    half = head_size // 2
    rotary_half = 0 if layer.rotary is None else layer.rotary.rotary_dim // 2
    is_neox = layer.rotary is None or layer.rotary.is_neox_style
    group = layer.num_heads // num_kv_heads
    sub_pad = max(triton.next_power_of_2(num_sub_vectors), 16 // size)
    anchor_rows, anchor_bytes = layer.vq.k_anchors.shape[2:]
    in_fp8 = layer.config.anchor_dtype == "fp8"
    exact_prefix, exact_reach = exact_bounds(layer.last_query)
    three_part = layer.rotary is not None and layer.rotary.sections is not None
    composes = layer.rotary is None or (len(layer.rotary.cos) >= VQ_BLOCK_SIZE and angles_are_linear(layer.rotary))
    return Shape(
        head_size=head_size,
        half_pad=max(triton.next_power_of_2(half), 16),
        head_pad=sub_pad * size,
        num_kv_heads=num_kv_heads,
        group=group,
        group_pad=triton.next_power_of_2(group),
        queries_pad=triton.next_power_of_2(min(layer.recency.score_slots, VQ_BLOCK_SIZE)),
        sub_vector_size=size,
        num_sub_vectors=num_sub_vectors,
        sub_pad=sub_pad,
        num_centroids=num_centroids,
        code_bits=layer.preset.code_bits,
        code_bytes=layer.vq.k_codes.shape[3],
        ordered=layer.k_order is not None,
        rotary_half=rotary_half,
        is_neox=is_neox,
        aligned=is_neox and half % size == 0 and rotary_half % size == 0,
        composes=composes and not three_part,
        three_part=three_part,
        anchor_rows=anchor_rows,
        anchor_pad=triton.next_power_of_2(max(anchor_rows, 1)),
        anchor_bytes=anchor_bytes,
        corrections=in_fp8,
        exact_anchor=EXACT_ANCHOR if layer.config.sinks or not in_fp8 else 0,
        page_size=layer.recency.k.shape[2],
        score_slots=layer.recency.score_slots,
        block_size=VQ_BLOCK_SIZE,
        reads_cache=layer.config.prefill_reads_cache,
        exact_prefix=exact_prefix,
        exact_reach=exact_reach,
        window=layer.rules.window or 0,
        soft_cap=layer.rules.soft_cap or 0.0,
        has_sinks=layer.rules.sinks is not None,
        has_jensen=bool(layer.jensen_weights.any()),
        dequantised_key_size=dequantised_sizes(layer)[0],
        dequantised_value_size=dequantised_sizes(layer)[1],
    )


def _handed(layer: LayerState) -> Layer:
    """What kernels are handed of a layer.

    Centroids in float16, as codebooks hold them, and as a layer on a GPU has them: nothing is copied there.
    """
    vq, recency = layer.vq, layer.recency
    centroids = [table.half().contiguous() for table in (layer.k_centroids, layer.v_centroids)]
    half_norms = layer.half_norms
    no_angles = layer.k_centroids.new_empty(0, dtype=torch.float32)
    nothing = layer.last_query.new_empty(0)
    sections = None if layer.rotary is None else layer.rotary.sections
    return Layer(
        k_codes=vq.k_codes,
        v_codes=vq.v_codes,
        k_anchors=vq.k_anchors,
        v_anchors=vq.v_anchors,
        k_exact=vq.as_exact_rows(vq.k_anchors, recency.k.dtype),
        v_exact=vq.as_exact_rows(vq.v_anchors, recency.v.dtype),
        anchor_offsets=vq.anchor_offsets,
        recent_k=recency.k,
        recent_v=recency.v,
        scores=recency.scores,
        positions=nothing if layer.positions is None else layer.positions,
        missing_rows=layer.counters.missing_rows,
        vq_block_stride=_units(vq.k_codes, 0),
        vq_head_stride=_units(vq.k_codes, 1),
        recency_block_stride=_units(recency.k, 0),
        recency_head_stride=_units(recency.k, 1),
        position_stride=0 if layer.positions is None else layer.positions.stride(0),
        k_centroids=centroids[0],
        v_centroids=centroids[1],
        k_half_norms=half_norms[0],
        v_half_norms=half_norms[1],
        k_order=nothing if layer.k_order is None else layer.k_order,
        cos=no_angles if layer.rotary is None else layer.rotary.cos.contiguous(),
        sin=no_angles if layer.rotary is None else layer.rotary.sin.contiguous(),
        sections=nothing if sections is None else sections.int(),
        last_query=layer.last_query,
        sinks=no_angles if layer.rules.sinks is None else layer.rules.sinks.float().contiguous(),
        jensen_weights=layer.jensen_weights,
    )


def _units(section: torch.Tensor, dimension: int) -> int:
    """A stride in the units that pages are aligned to."""
    units, rest = divmod(section.stride(dimension) * section.itemsize, ALIGNMENT)
    if rest:
        raise ValueError(f"Pages must be multiples of {ALIGNMENT} bytes, not {units * ALIGNMENT + rest}.")
    return units
