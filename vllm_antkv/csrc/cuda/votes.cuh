// Votes of a single query on the rows of its own block, from which the block's anchors are chosen when it closes: what
// `anchor_score` of vllm_antkv/ops/reference.py adds up, from logits that are there already.
//
// For queries that see all rows of their own block in full precision, as they do unless there is no recency at all. The
// warps that attend leave the logits in the span; the producer, which has time, counts when it gets the slot back.
#pragma once

#include "split.cuh"

// Of the last span of a split: its query is in the split, and with it the block that is voted on.
ANTKV_DEVICE bool is_voted_on(const Inputs& in, int end, int position) { return in.results.votes && end > position; }

// Where a token's scores are: of K, and `recency_block_size` behind it of V. Null where its page is gone.
ANTKV_DEVICE float* scores_at(const Inputs& in, const SplitDesc& desc, int token) {
    const Layer& layer = in.layer;
    u8* page = recency_page(layer, in.step, desc.request, in.head, token / layer.recency_block_size);
    return page ? (float*)(page + layer.recency_scores) + token % layer.recency_block_size : nullptr;
}

// A lane has every 32nd token of the block, and takes so many queries of the group together.
constexpr int kVoters = kBlockSize / kWarp, kQueriesAtOnce = smaller(kGroup, 4);
struct Votes {
    float key[kVoters], value[kVoters];
};

// num_tokens: of the block, up to the query's own.
ANTKV_DEVICE void add_votes(const Span& span, int first, int num_tokens, Lane lane, Votes& votes) {
    float logits[kQueriesAtOnce][kVoters], maxima[kQueriesAtOnce], totals[kQueriesAtOnce], squares[kQueriesAtOnce];
    for (int i = 0; i < kQueriesAtOnce; ++i) {
        const int q = smaller(first + i, kGroup - 1);
        maxima[i] = -ANTKV_INFINITY, totals[i] = squares[i] = 0;
        for (int own = 0; own < kVoters; ++own) {
            const int token = own * kWarp + lane.index;
            logits[i][own] = token < num_tokens ? span.voting[q][token] : -ANTKV_INFINITY;
            maxima[i] = fmaxf(maxima[i], logits[i][own]);
        }
        for (int channel = lane.index; channel < kHeadSize; channel += kWarp) {
            const float x = to_float(span.raw[q][channel]);
            squares[i] += x * x;
        }
    }
    largest_of_warp(maxima);
    for (int i = 0; i < kQueriesAtOnce; ++i)
        for (int own = 0; own < kVoters; ++own) totals[i] += logits[i][own] = exp2_fast(logits[i][own] - maxima[i]);
    sums_of_warp(totals);
    sums_of_warp(squares);
    for (int i = 0; i < kQueriesAtOnce && first + i < kGroup; ++i) {
        const float unit = reciprocal(totals[i]), norm = square_root(squares[i]);
        for (int own = 0; own < kVoters; ++own) {
            const float share = logits[i][own] * unit;
            votes.value[own] += share;
            votes.key[own] += share * (1 - share) * norm;
        }
    }
}

// By a whole warp. Logits are relative to base 2.
ANTKV_DEVICE void count_votes(const Inputs& in, const Span& span, Lane lane) {
    const SplitDesc desc = span.desc;
    const int block = desc.position / kBlockSize * kBlockSize, num_tokens = desc.position - block + 1;
    // Before anything waits for them; those of no token are not used.
    float* scores[kVoters];
    for (int own = 0; own < kVoters; ++own)
        scores[own] = scores_at(in, desc, smaller(block + own * kWarp + lane.index, desc.position));
    const bool is_sink = in.results.is_sink && in.results.is_sink[desc.query_row];
    Votes votes = {};
#pragma unroll 1
    for (int first = 0; first < kGroup; first += kQueriesAtOnce) add_votes(span, first, num_tokens, lane, votes);
    for (int own = 0; own < kVoters; ++own) {
        const int token = own * kWarp + lane.index;
        if (!scores[own] || token >= num_tokens) continue;
        float *key = scores[own], *value = key + in.layer.recency_block_size;
        if (token < num_tokens - 1) {
            add_to(key, votes.key[own]);
            add_to(value, votes.value[own]);
        } else {
            // What the query's own token had was another's.
            *key = is_sink ? ANTKV_INFINITY : votes.key[own];
            *value = is_sink ? ANTKV_INFINITY : votes.value[own];
        }
    }
}
