"""How one query's attention divides between full-precision and coded rows, for the metrics.

Plain PyTorch, from the pages, on a sample: kernels never store the attention matrix and are not asked to. Everything is
queued on the device; nothing here waits for it.
"""

import torch

from vllm_antkv.cache.pages import VQPages
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.reference import corrected, decode, jensen_bias, unpack_codes
from vllm_antkv.ops.rope import rotate
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.select.anchors import EXACT_ANCHOR

#: VQ blocks decoded at a time: 32,768 tokens, 16 MiB with 128 channels.
_CHUNK_BLOCKS = 256


def attention_shares(
    layer: LayerState, query: torch.Tensor, keys: torch.Tensor, step: StepPlan, kv_head: int
) -> torch.Tensor:
    """Shares of the attention of a step's last query, the mean over the heads that share a KV head.

    `recent` are the rows that positions keep exact: recency, intact prefix, open block, the query's own token. A token
    may be an anchor for K, for V or for both: `anchors` is the mean of the attention to the one and to the other. What
    learned sinks take is left out.

    Args:
        layer: pages after the step.
        query: (num_heads, head_size).
        keys: (n, num_kv_heads, head_size), K rows of the new tokens of the last request, of which the query's is the
            last; the pages need not have them.
        step: queries of prompts see its tokens as later ones will.
        kv_head: which of the KV heads.

    Returns:
        (3,) float64 in the order of `counters.ROW_CLASSES`; they add up to 1.
    """
    grouped = query.unflatten(0, (keys.shape[1], -1))[kv_head]
    num_blocks = min(-(-step.max_seq_len // VQ_BLOCK_SIZE), step.vq_block_table.shape[1])
    chunks = []
    for first in range(0, num_blocks, _CHUNK_BLOCKS):
        blocks = range(first, min(first + _CHUNK_BLOCKS, num_blocks))
        chunks.append(_chunk(layer, grouped, keys[:, kv_head], step, blocks, kv_head))
    logits, recent, anchors = (torch.cat(parts, dim=-1) for parts in zip(*chunks, strict=True))
    probs = logits.softmax(-1)
    recent_share = (probs * recent).sum(-1).mean().double()
    anchor_share = (probs * anchors).sum(-1).mean().double()
    # Rounding may leave less than nothing, which no counter takes.
    coded_share = (1 - recent_share - anchor_share).clamp(min=0)
    return torch.stack((recent_share, anchor_share, coded_share))


def _chunk(
    layer: LayerState, query: torch.Tensor, new_keys: torch.Tensor, step: StepPlan, blocks: range, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some blocks: logits (heads of the KV head, T), `recent` (T,) bool, `anchors` (T,) 0, 1/2 or 1."""
    position = step.seq_lens[-1].long() - 1
    positions = torch.arange(blocks.start * VQ_BLOCK_SIZE, blocks.stop * VQ_BLOCK_SIZE, device=query.device)
    block_ids = step.vq_block_table[-1, blocks.start : blocks.stop].long()
    # A query sees the anchors of the blocks before its own.
    closed = torch.arange(blocks.start, blocks.stop, device=query.device) < position // VQ_BLOCK_SIZE
    coded, is_anchor = _coded_rows(layer, positions, block_ids, closed, kv_head)
    known = positions.clamp(max=len(layer.last_query) - 1)
    seen = layer.rules.visible(position, positions)
    recent = (layer.last_query[known] >= position) & seen
    stored = _recency_rows(layer, positions, step, kv_head)
    place = positions - (position + 1 - len(new_keys))
    in_hand = new_keys[place.clamp(0, len(new_keys) - 1)]
    exact = torch.where((place >= 0)[:, None], in_hand, stored).to(coded.dtype)
    rows = torch.where(recent[:, None], exact, coded)
    query = query.to(rows.dtype)
    weights = layer.jensen_weights.unflatten(0, (-1, len(query)))[kv_head].to(rows.dtype)
    is_code = ~recent & (is_anchor[0] == 0)
    bias = jensen_bias(query[None, None], weights, is_code[None, :, None])[0, :, 0]
    logits = layer.rules.logits(query @ rows.T, bias)
    return logits.masked_fill(~seen, -torch.inf), recent, is_anchor.mean(0) * ~recent


def _coded_rows(
    layer: LayerState, positions: torch.Tensor, block_ids: torch.Tensor, closed: torch.Tensor, kv_head: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decoded K rows, the anchors of `closed` blocks corrected, (T, D); 1 for anchors of K and of V, else 0, (2, T)."""
    # Layers on GPUs hold float16, which is too coarse to compute in.
    dtype = torch.promote_types(layer.k_centroids.dtype, torch.float32)
    vq, centroids = layer.vq, layer.k_centroids[kv_head, None].to(dtype)
    packed = vq.k_codes[block_ids, kv_head].flatten(0, 1)[:, None]
    rows = decode(unpack_codes(packed, layer.preset, centroids.shape[1]), centroids)
    if layer.rotary is not None:
        rows = rotate(rows, layer.rope_positions(block_ids.repeat_interleave(VQ_BLOCK_SIZE), positions), layer.rotary)
    rows = layer.to_model_order(rows)
    offsets = vq.anchor_offsets[block_ids, kv_head].long()
    is_exact = offsets >= EXACT_ANCHOR
    offsets = torch.where(is_exact, offsets - EXACT_ANCHOR, offsets)
    # Unused rows go to one slot more than a block has; choosing among them instead would wait for the device.
    used = (offsets >= 0) & (offsets < VQ_BLOCK_SIZE) & closed[:, None, None]
    slots = torch.where(used, offsets, VQ_BLOCK_SIZE)
    flags = rows.new_zeros(*slots.shape[:-1], VQ_BLOCK_SIZE + 1).scatter_(-1, slots, 1.0)[..., :VQ_BLOCK_SIZE]
    blocks = torch.nn.functional.pad(rows.view(len(block_ids), VQ_BLOCK_SIZE, -1), (0, 0, 0, 1))
    index = slots[:, 0, :, None].expand(-1, -1, blocks.shape[-1])
    decoded, anchors = blocks.gather(1, index), vq.k_anchors[block_ids, kv_head]
    exact_rows = VQPages.as_exact_rows(vq.k_anchors, layer.recency.k.dtype)[block_ids, kv_head]
    exact = torch.nn.functional.pad(exact_rows.repeat_interleave(2, dim=1), (0, 0, 0, anchors.shape[1] % 2)).to(dtype)
    in_fp8 = corrected(decoded, anchors[..., : decoded.shape[-1]])
    blocks.scatter_(1, index, torch.where(is_exact[:, 0, :, None], exact, in_fp8))
    return blocks[:, :VQ_BLOCK_SIZE].flatten(0, 1), flags.transpose(0, 1).flatten(1)


def _recency_rows(layer: LayerState, positions: torch.Tensor, step: StepPlan, kv_head: int) -> torch.Tensor:
    """K rows where the recency pages of the last request would have them, (T, D); anything where they have none."""
    page_size = layer.recency.k.shape[2]
    index = (positions // page_size).clamp(max=step.recency_block_table.shape[1] - 1)
    return layer.recency.k[step.recency_block_table[-1, index].long(), kv_head, positions % page_size]
