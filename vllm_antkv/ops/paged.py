"""The operations on pages in plain PyTorch: the specification of every kernel, and what runs where there is none.

Obvious rather than fast: request by request, block by block, on gathered rows in float32 (in tests: float64).
"""

import torch

from vllm_antkv.cache.pages import NO_ANCHOR, VQPages
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.reference import (
    SeenRows,
    anchor_score,
    causal_lse,
    corrected,
    correction,
    decode,
    encode,
    jensen_bias,
    mixed_attention,
    pack_codes,
    unpack_codes,
)
from vllm_antkv.ops.rope import rotate, unrotate
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan, StepRequest, step_requests
from vllm_antkv.select.anchors import EXACT_ANCHOR, SINK_SCORE, block_anchors, code_errors


class ReferenceOperations:
    """See `LayerOperations`."""

    def __init__(self, layer: LayerState) -> None:
        self._layer = layer
        self._dtype = layer.k_centroids.dtype

    def run(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`."""
        timed = self._layer.counters.timed
        with timed("encode_store"):
            self.encode_store(rows, step)
        if self._layer.config.anchor_rows:
            with timed("anchor_score"):
                self.anchor_score(rows, step)
        with timed("attend"):
            self.attend(rows, output, step)

    def encode_store(self, rows: StepRows, step: StepPlan) -> None:
        """Write the codes of the step's tokens, and the full-precision rows of those that own a recency page."""
        key, value = rows.key, rows.value
        for request in step_requests(step):
            positions = torch.arange(request.start, request.end, device=key.device)
            own = request.rows(request.start, request.end)
            self._store_codes(key[own].to(self._dtype), value[own].to(self._dtype), positions, request)
            self._store_rows(key[own], value[own], positions, request)

    def anchor_score(self, rows: StepRows, step: StepPlan, singles: bool = True) -> None:
        """Add the votes of the step's queries to the Anchor Scores; choose the anchors of the blocks that close.

        singles: those of requests with one new token, too.
        """
        for request in step_requests(step):
            if singles or request.end - request.start > 1:
                self._score(rows, request)

    def close_blocks(self, rows: StepRows, step: StepPlan) -> None:
        """Choose the anchors of blocks that the only new token of a request fills, from the scores in the pages."""
        for request in step_requests(step):
            if request.end - request.start == 1 and request.end % VQ_BLOCK_SIZE == 0:
                positions = torch.arange(request.end - VQ_BLOCK_SIZE, request.end, device=rows.key.device)
                scores = self._carried_scores(positions, request.end, request)
                self._close(scores, rows, positions, request)

    def _score(self, rows: StepRows, request: StepRequest) -> None:
        rules = self._layer.rules
        for block, begin, end in request.segments():
            first = block * VQ_BLOCK_SIZE
            positions = torch.arange(first, end, device=rows.key.device)
            exact_key = self._exact_rows(rows.key, self._layer.recency.k, positions, request)
            scores = self._carried_scores(positions, begin, request)
            # The next step may continue behind any of the last queries.
            unsettled = range(max(begin + 1, request.end - self._layer.recency.score_slots + 1), end)
            for upto in (*unsettled, end):
                new = request.rows(begin, upto)
                seen = rules.visible(torch.arange(begin, upto, device=rows.key.device)[:, None], positions)
                query = rows.query[None, new].to(self._dtype)
                lse = causal_lse(query, exact_key[None], seen[None], rules)
                scores += torch.cat(anchor_score(query, exact_key[None], lse, seen[None].to(self._dtype), rules))
                if rows.is_sink is not None:
                    scores[:, :, begin - first : upto - first].masked_fill_(rows.is_sink[new], SINK_SCORE)
                if upto % VQ_BLOCK_SIZE:
                    self._keep_scores(scores, positions[: upto - first], request)
                begin = upto
            if end % VQ_BLOCK_SIZE == 0:
                self._close(scores, rows, positions, request)

    def _slot(self, end: int) -> slice:
        """Where the scores are kept that queries before `end` add up to."""
        first = (end - 1) % self._layer.recency.score_slots * 2
        return slice(first, first + 2)

    def _keep_scores(self, scores: torch.Tensor, positions: torch.Tensor, request: StepRequest) -> None:
        """Of all tokens of a block so far, (2, num_kv_heads, 128), for the step behind the last of `positions`."""
        pages, offsets = self._recency_slots(positions, request)
        # A block that closes in this step, whatever is rejected, has no pages.
        real, slot = pages > 0, self._slot(int(positions[-1]) + 1)
        kept = scores[:, :, : len(positions)].permute(2, 1, 0)[real].float()
        self._layer.recency.scores[pages[real], :, slot, offsets[real]] = kept

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan, fewest: int = 1) -> None:
        """See `LayerOperations`.

        fewest: new tokens of a request; rows of those with fewer may hold anything.
        """
        rules, weights = self._layer.rules, self._layer.jensen_weights.to(self._dtype)
        for request in step_requests(step):
            if request.end - request.start < fewest:
                continue
            num_blocks = -(-request.end // VQ_BLOCK_SIZE)
            # Blocks that no query of the step sees are gone.
            first_block = rules.first_visible(request.start) // VQ_BLOCK_SIZE
            origin = first_block * VQ_BLOCK_SIZE
            block_ids = request.vq_blocks[first_block:num_blocks].long()
            coded_key, coded_value = self._decoded(block_ids, origin)
            is_anchor = coded_key.new_zeros(2, *coded_key.shape[:2], dtype=torch.bool)
            num_corrected = 0
            for block, begin, end in request.segments():
                # A query sees the anchors of the blocks before its own.
                closed = range(num_corrected, block - first_block)
                self._correct_anchors(coded_key, coded_value, block_ids, closed, is_anchor)
                num_corrected = closed.stop
                past = torch.arange(origin, end, device=rows.key.device)
                queries = torch.arange(begin, end, device=rows.key.device)[:, None]
                seen = rules.visible(queries, past)
                exact = seen & self._seen_exactly(past, queries, request)
                columns = exact.any(0).nonzero().flatten()
                num_past = end - origin
                new = request.rows(begin, end)
                query = rows.query[None, new].to(self._dtype)
                result = mixed_attention(
                    query,
                    SeenRows(coded_key[None, :num_past], coded_value[None, :num_past], (seen & ~exact)[None]),
                    SeenRows(
                        self._exact_rows(rows.key, self._layer.recency.k, past[columns], request)[None],
                        self._exact_rows(rows.value, self._layer.recency.v, past[columns], request)[None],
                        exact[None, :, columns],
                    ),
                    rules,
                    jensen_bias(query, weights, ~is_anchor[:1, :num_past]),
                )
                output[new] = result[0].to(output.dtype)

    def _seen_exactly(self, keys: torch.Tensor, queries: torch.Tensor, request: StepRequest) -> torch.Tensor:
        # A token behind the prompt, and drafts behind it.
        decodes = request.end - request.start <= self._layer.recency.score_slots and not request.is_prefilling
        seen_by = queries if decodes or self._layer.config.prefill_reads_cache else request.start
        return self._layer.last_query[keys] >= seen_by

    def _store_codes(
        self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, request: StepRequest
    ) -> None:
        layer = self._layer
        block_ids = request.vq_blocks[positions // VQ_BLOCK_SIZE].long()
        offsets = positions % VQ_BLOCK_SIZE
        # Blocks fill from their first token, so whoever had the block before left its anchors until here.
        layer.vq.anchor_offsets[block_ids[offsets == 0]] = NO_ANCHOR
        key = layer.to_code_order(key)
        raw_key = (
            key if layer.rotary is None else unrotate(key, layer.rope_positions(block_ids, positions), layer.rotary)
        )
        layer.vq.k_codes[block_ids, :, offsets] = pack_codes(encode(raw_key, layer.k_centroids), layer.preset)
        layer.vq.v_codes[block_ids, :, offsets] = pack_codes(encode(value, layer.v_centroids), layer.preset)

    def _store_rows(
        self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, request: StepRequest
    ) -> None:
        pages, offsets = self._recency_slots(positions, request)
        real = pages > 0
        self._layer.recency.k[pages[real], :, offsets[real]] = key[real]
        self._layer.recency.v[pages[real], :, offsets[real]] = value[real]

    def _recency_slots(self, positions: torch.Tensor, request: StepRequest) -> tuple[torch.Tensor, torch.Tensor]:
        """Page and offset in the page of the recency rows of tokens."""
        page_size = self._layer.recency.k.shape[2]
        return request.recency_blocks[positions // page_size].long(), positions % page_size

    def _exact_rows(
        self, in_hand: torch.Tensor, paged: torch.Tensor, positions: torch.Tensor, request: StepRequest
    ) -> torch.Tensor:
        """Full-precision K (or V) rows of tokens, from the step or from their pages. (E, H, D).

        Zeros where a page is the null block: see `Counters.missing_rows`.
        """
        stored, new = positions[positions < request.start], positions[positions >= request.start]
        pages, offsets = self._recency_slots(stored, request)
        missing = pages == 0
        self._layer.counters.missing_rows[request.row] |= missing.any()
        rows = paged[pages, :, offsets].masked_fill(missing[:, None, None], 0)
        return torch.cat((rows, in_hand[request.first - request.start + new])).to(self._dtype)

    def _carried_scores(self, positions: torch.Tensor, begin: int, request: StepRequest) -> torch.Tensor:
        """Scores of K and V, (2, num_kv_heads, len(positions)): those of earlier steps from the pages, else zero."""
        layer = self._layer
        scores = layer.k_centroids.new_zeros(2, layer.k_centroids.shape[0], len(positions))
        carried = positions[positions < begin]
        pages, offsets = self._recency_slots(carried, request)
        kept = layer.recency.scores[pages, :, self._slot(begin), offsets]
        kept = kept.masked_fill((pages == 0)[:, None, None], 0)
        scores[:, :, : len(carried)] = kept.permute(2, 1, 0).to(scores.dtype)
        return scores

    def _decoded(self, block_ids: torch.Tensor, first_position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that the codes of blocks stand for, K after RoPE; (tokens, num_kv_heads, head_size) each."""
        layer = self._layer
        rows = []
        for codes, centroids in ((layer.vq.k_codes, layer.k_centroids), (layer.vq.v_codes, layer.v_centroids)):
            packed = codes[block_ids].transpose(1, 2).flatten(0, 1)
            rows.append(decode(unpack_codes(packed, layer.preset, centroids.shape[1]), centroids))
        if layer.rotary is not None:
            positions = first_position + torch.arange(len(rows[0]), device=block_ids.device)
            rotated_by = layer.rope_positions(block_ids.repeat_interleave(VQ_BLOCK_SIZE), positions)
            rows[0] = rotate(rows[0], rotated_by, layer.rotary)
        return layer.to_model_order(rows[0]), rows[1]

    def _correct_anchors(
        self, key: torch.Tensor, value: torch.Tensor, block_ids: torch.Tensor, closed: range, is_anchor: torch.Tensor
    ) -> None:
        """Correct the decoded rows that are anchors of the blocks `closed` of those decoded.

        is_anchor: (2, tokens, num_kv_heads) bool, those of K and of V; set here.
        """
        vq = self._layer.vq
        ids = block_ids[closed.start : closed.stop]
        for kind, (rows, anchors) in enumerate(((key, vq.k_anchors), (value, vq.v_anchors))):
            offsets = vq.anchor_offsets[ids][:, :, kind].long()
            tokens = (closed.start + torch.arange(len(ids), device=ids.device))[:, None, None] * VQ_BLOCK_SIZE + offsets
            block, head, row = torch.nonzero((offsets >= 0) & (offsets < EXACT_ANCHOR), as_tuple=True)
            token = tokens[block, head, row]
            corrections = anchors[ids[block], head, row, : rows.shape[-1]]
            rows[token, head] = corrected(rows[token, head], corrections)
            is_anchor[kind, token, head] = True
            block, head, row = torch.nonzero(offsets >= EXACT_ANCHOR, as_tuple=True)
            token = tokens[block, head, row] - EXACT_ANCHOR
            exact = self._exact_anchors(anchors)[ids[block], head, row // 2]
            rows[token, head] = exact.to(rows.dtype)
            is_anchor[kind, token, head] = True

    def _exact_anchors(self, anchors: torch.Tensor) -> torch.Tensor:
        return VQPages.as_exact_rows(anchors, self._layer.recency.k.dtype)

    def _close(self, scores: torch.Tensor, in_hand: StepRows, positions: torch.Tensor, request: StepRequest) -> None:
        recency = self._layer.recency
        key, value = (
            self._exact_rows(rows, paged, positions, request)
            for rows, paged in zip((in_hand.key, in_hand.value), (recency.k, recency.v), strict=True)
        )
        block_id = int(request.vq_blocks[int(positions[0]) // VQ_BLOCK_SIZE])
        self._choose(scores, (key, value), positions, block_id)

    def _choose(
        self, scores: torch.Tensor, exact: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor, block_id: int
    ) -> None:
        """Choose and store the anchors of a block that is full; `exact` are its K and V rows, (128, H, D)."""
        layer, config = self._layer, self._layer.config
        coded = self._decoded(torch.tensor([block_id], device=positions.device), int(positions[0]))
        for kind, anchors in enumerate((layer.vq.k_anchors, layer.vq.v_anchors)):
            offsets = block_anchors(
                scores[kind],
                code_errors(exact[kind], coded[kind]),
                positions[None] < config.prefix,
                config,
                layer.rules.window,
            )
            layer.vq.anchor_offsets[block_id, :, kind] = offsets.to(torch.int16)
            if layer.counts_rows:
                layer.counters.count_anchors(offsets)
            index = (offsets.clamp(min=0) % EXACT_ANCHOR)[..., None].expand(-1, -1, exact[kind].shape[-1])
            corrections = correction(exact[kind], coded[kind]).transpose(0, 1)
            anchors[block_id, :, :, : index.shape[-1]] = corrections.gather(1, index)
            in_pairs = self._exact_anchors(anchors)[block_id]
            num_rows = 2 * in_pairs.shape[1]
            is_exact = offsets[:, :num_rows:2] >= EXACT_ANCHOR
            rows = exact[kind].transpose(0, 1).gather(1, index[:, :num_rows:2])
            in_pairs[is_exact] = rows[is_exact].to(in_pairs.dtype)
