"""The operations on pages, in reference form: what an attention layer does in one step.

`encode_store` writes the step's tokens, `attend` reads the cache for them and picks the anchors of the blocks that
close. Plain PyTorch on gathered rows, float32; imports no vLLM. Kernels that replace it must give the same pages.
"""

from dataclasses import dataclass

import torch

from vllm_antkv.cache.pages import NO_ANCHOR, RecencyPages, VQPages
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.plan import StepPlan, Wave
from vllm_antkv.ops.reference import anchor_score, decode, encode, mixed_attention, pack_codes, unpack_codes
from vllm_antkv.ops.rope import RotaryTable, rotate, unrotate
from vllm_antkv.presets import Preset
from vllm_antkv.select.anchors import SINK_SCORE, block_anchors

#: What status and metrics call these operations.
IMPLEMENTATION = "reference"


@dataclass(frozen=True)
class LayerState:
    """What a layer needs beside the step: its pages, its centroids and its rotary table.

    k_centroids, v_centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float32.
    rotary: None for a layer without RoPE.
    counters: of this worker.
    counts_rows: this layer's anchors are the ones that are counted.
    """

    vq: VQPages
    recency: RecencyPages
    k_centroids: torch.Tensor
    v_centroids: torch.Tensor
    preset: Preset
    rotary: RotaryTable | None
    config: AntKVConfig
    scale: float
    counters: Counters
    counts_rows: bool


@dataclass(frozen=True)
class StepTables:
    """Block tables of a step, for VQ pages and for recency pages, where 0 is the null block.

    vq, recency: (num_reqs, max_blocks) integer.
    """

    vq: torch.Tensor
    recency: torch.Tensor


def encode_store(key: torch.Tensor, value: torch.Tensor, layer: LayerState, plan: StepPlan, tables: StepTables) -> None:
    """Write the codes of the step's tokens, and the full-precision rows of those that own a recency page.

    Args:
        key, value: (num_tokens, num_kv_heads, head_size) model dtype, K after RoPE.
    """
    block_ids = tables.vq[plan.token_request, plan.positions // VQ_BLOCK_SIZE].long()
    offsets = plan.positions % VQ_BLOCK_SIZE
    # Blocks fill from their first token, so whoever had the block before left its anchors until here.
    layer.vq.anchor_offsets[block_ids[offsets == 0]] = NO_ANCHOR
    raw_key = key.float() if layer.rotary is None else unrotate(key.float(), plan.positions, layer.rotary)
    layer.vq.k_codes[block_ids, :, offsets] = pack_codes(encode(raw_key, layer.k_centroids), layer.preset)
    layer.vq.v_codes[block_ids, :, offsets] = pack_codes(encode(value.float(), layer.v_centroids), layer.preset)
    pages, page_offsets, real = _recency_slots(layer, tables, plan.token_request, plan.positions)
    layer.recency.k[pages[real], :, page_offsets[real]] = key[real]
    layer.recency.v[pages[real], :, page_offsets[real]] = value[real]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_sink: torch.Tensor | None,
    output: torch.Tensor,
    layer: LayerState,
    plan: StepPlan,
    tables: StepTables,
) -> None:
    """Attention of the step's queries to the cache and the tokens in hand; picks anchors of blocks that close.

    Args:
        query: (num_tokens, num_heads, head_size) model dtype.
        key, value: (num_tokens, num_kv_heads, head_size) model dtype, K after RoPE; already stored.
        is_sink: (num_tokens,) bool, tokens to pin (KVSink), or None.
        output: (num_tokens, num_heads, head_size), written.
    """
    scores = _initial_scores(is_sink, key, layer, plan, tables)
    closing: list[_Closing] = []
    for wave in plan.waves:
        exact_key, exact_value = _exact_rows(wave, key, value, layer, tables)
        coded_key, coded_value = _coded_rows(wave, layer, tables)
        wave_query = query[wave.query_token].float()
        result, lse = mixed_attention(
            wave_query, coded_key, coded_value, wave.coded_mask, exact_key, exact_value, wave.exact_mask, layer.scale
        )
        output[wave.query_token[wave.query_valid]] = result[wave.query_valid].to(output.dtype)
        if not layer.config.anchor_rows:
            continue
        with layer.counters.timed("anchor_selection"):
            new_scores = torch.stack(anchor_score(wave_query, exact_key, lse, wave.vote_mask, layer.scale))
            scores.index_add_(2, wave.score_slot.flatten(), new_scores.permute(0, 2, 1, 3).flatten(2))
            exact, coded = (exact_key, exact_value), (coded_key, coded_value)
            closing.append(_Closing(wave, *_own_rows(wave, exact, coded)))
            if layer.config.anchor_scope == "block":
                _close_blocks(closing, scores, layer, tables)
    with layer.counters.timed("anchor_selection"):
        _close_blocks(closing, scores, layer, tables)
        _carry_scores(scores, layer, plan, tables)


def _initial_scores(
    is_sink: torch.Tensor | None, key: torch.Tensor, layer: LayerState, plan: StepPlan, tables: StepTables
) -> torch.Tensor:
    """Scores of K and V, (2, num_kv_heads, num_score_slots): carried ones from the pages, the others zero."""
    scores = torch.zeros(2, key.shape[1], plan.num_score_slots, device=key.device)
    if not layer.config.anchor_rows:
        return scores
    pages, offsets, _ = _recency_slots(layer, tables, plan.carried_request, plan.carried_pos)
    scores[:, :, plan.carried_slot] = layer.recency.scores[pages, :, :, offsets].permute(2, 1, 0)
    if is_sink is not None:
        scores[:, :, : plan.num_tokens].masked_fill_(is_sink, SINK_SCORE)
    return scores


def _carry_scores(scores: torch.Tensor, layer: LayerState, plan: StepPlan, tables: StepTables) -> None:
    """Keep the scores of blocks that are still open beside their rows."""
    if layer.config.anchor_rows:
        pages, offsets, _ = _recency_slots(layer, tables, plan.open_request, plan.open_pos)
        layer.recency.scores[pages, :, :, offsets] = scores[:, :, plan.open_slot].permute(2, 1, 0)


def _exact_rows(
    wave: Wave, key: torch.Tensor, value: torch.Tensor, layer: LayerState, tables: StepTables
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in full precision: those in hand from the step's tensors, the others from recency pages. (S, E, H, D)."""
    in_hand = wave.exact_token >= 0
    # The others stay zero, since 0 times garbage may be NaN.
    stored = wave.exact_valid & ~in_hand
    pages, offsets, _ = _recency_slots(layer, tables, wave.requests[:, None], wave.exact_pos)
    rows = []
    for step_rows, paged_rows in ((key, layer.recency.k), (value, layer.recency.v)):
        gathered = step_rows.new_zeros(*wave.exact_pos.shape, *step_rows.shape[1:], dtype=torch.float32)
        gathered[in_hand] = step_rows[wave.exact_token[in_hand]].float()
        gathered[stored] = paged_rows[pages[stored], :, offsets[stored]].float()
        rows.append(gathered)
    return rows[0], rows[1]


def _coded_rows(wave: Wave, layer: LayerState, tables: StepTables) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows decoded from the VQ pages, with the anchors of closed blocks put in. (S, T, H, D)."""
    num_blocks = wave.coded_mask.shape[-1] // VQ_BLOCK_SIZE
    block_ids = tables.vq[wave.requests, :num_blocks].long()
    num_sub_vectors = layer.k_centroids.shape[1]
    rows = []
    for codes, centroids in ((layer.vq.k_codes, layer.k_centroids), (layer.vq.v_codes, layer.v_centroids)):
        packed = codes[block_ids].transpose(2, 3).flatten(1, 2)
        rows.append(decode(unpack_codes(packed, layer.preset, num_sub_vectors), centroids))
    if layer.rotary is not None:
        positions = torch.arange(rows[0].shape[1], device=block_ids.device).expand(len(block_ids), -1)
        rows[0] = rotate(rows[0], positions.clamp(max=layer.rotary.cos.shape[0] - 1), layer.rotary)
    closed = torch.arange(num_blocks, device=block_ids.device) < wave.own_block[:, None]
    for kind, anchors in enumerate((layer.vq.k_anchors, layer.vq.v_anchors)):
        offsets = layer.vq.anchor_offsets[block_ids][:, :, :, kind].long()
        segment, block, head, row = torch.nonzero(
            (offsets >= 0) & (offsets < VQ_BLOCK_SIZE) & closed[..., None, None], as_tuple=True
        )
        token = block * VQ_BLOCK_SIZE + offsets[segment, block, head, row]
        rows[kind][segment, token, head] = anchors[block_ids[segment, block], head, row].float()
    return rows[0], rows[1]


@dataclass(frozen=True)
class _Closing:
    """Blocks that a wave filled, B of them, with their rows for K and for V.

    exact, coded: 2 x (B, VQ_BLOCK_SIZE, num_kv_heads, head_size).
    """

    wave: Wave
    exact: tuple[torch.Tensor, ...]
    coded: tuple[torch.Tensor, ...]


def _own_rows(
    wave: Wave, exact: tuple[torch.Tensor, ...], coded: tuple[torch.Tensor, ...]
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Rows of the blocks that the wave fills."""
    closed = wave.closes
    own = wave.own_block[closed, None] * VQ_BLOCK_SIZE + torch.arange(VQ_BLOCK_SIZE, device=closed.device)
    segments = closed.nonzero()
    return (
        tuple(rows[closed, :VQ_BLOCK_SIZE] for rows in exact),
        tuple(rows[segments, own] for rows in coded),
    )


def _close_blocks(closing: list[_Closing], scores: torch.Tensor, layer: LayerState, tables: StepTables) -> None:
    """Choose and store the anchors of the blocks that these waves filled; empties the list."""
    config = layer.config
    for filled in closing:
        wave, closed = filled.wave, filled.wave.closes
        block_ids = tables.vq[wave.requests[closed], wave.own_block[closed]].long()
        slots = wave.score_slot[closed, :VQ_BLOCK_SIZE]
        for kind, anchors in enumerate((layer.vq.k_anchors, layer.vq.v_anchors)):
            rows = filled.exact[kind]
            offsets = block_anchors(
                scores[kind][:, slots].transpose(0, 1),
                rows,
                filled.coded[kind],
                anchors.shape[2],
                wave.pinned[closed, None],
                config.anchor_share > 0,
                config.anchor_scope,
            )
            layer.vq.anchor_offsets[block_ids, :, kind] = offsets.to(torch.int16)
            if layer.counts_rows:
                layer.counters.count_anchors(offsets)
            index = offsets.clamp(min=0)[..., None].expand(-1, -1, -1, rows.shape[-1])
            anchors[block_ids] = rows.transpose(1, 2).gather(2, index).to(anchors.dtype)
    closing.clear()


def _recency_slots(
    layer: LayerState, tables: StepTables, requests: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Block id, offset in the block, and whether it is a real block, of the recency rows of tokens."""
    block_size = layer.recency.k.shape[2]
    block_ids = tables.recency[requests, positions // block_size].long()
    return block_ids, positions % block_size, block_ids > 0
