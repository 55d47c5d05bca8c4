// Votes of a single query on the rows of its own block, from which the block's anchors are chosen when it closes: what
// `anchor_score` of vllm_antkv/ops/reference.py adds up, from logits that are there already.
//
// For queries that see all rows of their own block in full precision, as they do unless there is no recency at all.
#pragma once

#include "rows.cuh"

// Of the last span of a split: its query is in the split, and with it the block that is voted on.
ANTKV_DEVICE bool is_voted_on(const Inputs& in, int end, int position) { return in.results.votes && end > position; }

// Where a token's scores are, of K and V, and what they were so far: of the query's own token, nothing but being a sink.
struct Slot {
    float *key, *value, carried[2];
};

ANTKV_DEVICE Slot find_slot(const Inputs& in, const Work& work, int token) {
    const Layer& layer = in.layer;
    u8* page = recency_page(layer, in.step, work.request, in.head, token / layer.recency_block_size);
    if (!page) return {};
    float* scores = (float*)(page + layer.recency_scores) + token % layer.recency_block_size;
    Slot slot = {scores, scores + layer.recency_block_size};
    if (token < work.position)
        slot.carried[0] = *slot.key, slot.carried[1] = *slot.value;
    else if (in.results.is_sink && in.results.is_sink[work.hand])
        slot.carried[0] = slot.carried[1] = ANTKV_INFINITY;
    return slot;
}

// All attending warps come here together. Logits are those of the last span, relative to base 2.
ANTKV_DEVICE void count_votes(const Inputs& in, Shared& shared, const Span& span, Lane lane, int warp) {
    const Work& work = span.work;
    const int block = work.position / kBlockSize * kBlockSize;
    const int tile = (work.token + warp * kTokens - block) / kTokens, token = block + tile * kTokens + lane.index;
    const int num_tiles = (work.position - block) / kTokens + 1;
    const bool votes = work.token + warp * kTokens >= block && tile < num_tiles;
    Slot slot = {};
    if (votes) {
        if (token <= work.position) slot = find_slot(in, work, token);
        float maxima[kGroup], totals[kGroup];
        for (int q = 0; q < kGroup; ++q)
            totals[q] = maxima[q] = token <= work.position ? shared.logits(warp)[q][lane.index] : -ANTKV_INFINITY;
        largest_of_warp(maxima);
        for (int q = 0; q < kGroup; ++q) totals[q] = exp2_fast(totals[q] - maxima[q]);
        sums_of_warp(totals);
        if (lane.index == 0)
            for (int q = 0; q < kGroup; ++q) shared.block_statistics[tile][q] = {maxima[q], totals[q]};
    }
    sync_attending();
    if (!votes || token > work.position) return;
    float key_vote = 0, value_vote = 0;
    for (int q = 0; q < kGroup; ++q) {
        float2 tiles[kTilesPerPage];
        float maximum = -ANTKV_INFINITY, total = 0;
        for (int i = 0; i < kTilesPerPage; ++i) {
            if (i < num_tiles) tiles[i] = shared.block_statistics[i][q];
            else tiles[i] = {-ANTKV_INFINITY, 0};
            maximum = fmaxf(maximum, tiles[i].x);
        }
        for (int i = 0; i < kTilesPerPage; ++i) total += tiles[i].y * exp2_fast(tiles[i].x - maximum);
        const float share = exp2_fast(shared.logits(warp)[q][lane.index] - maximum) * reciprocal(total);
        value_vote += share;
        key_vote += share * (1 - share) * span.norms[q];
    }
    if (slot.key) *slot.key = slot.carried[0] + key_vote, *slot.value = slot.carried[1] + value_vote;
}
