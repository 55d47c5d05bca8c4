// Loading ahead of a tile's turn; where its rows in full precision and its anchors are.
#pragma once

#include "split.cuh"

ANTKV_DEVICE const u8* page_at(const Split& split, int token) {
    if (token >= split.end) return nullptr;
    return vq_page(split.layer, split.step, split.request, split.head, token / kBlockSize);
}

ANTKV_DEVICE void copy_codes(const Split& split, const u8* page, int token, int buffer) {
    if (page) {
        u8(*to)[kTokens * kCodeBytes] = ((Staging*)split.shared.staging)->codes[split.warp][buffer];
        const u8* from = page + (token % kBlockSize) * kCodeBytes;
        for (int at = split.lane.index * 16; at < kTokens * kCodeBytes; at += kWarp * 16) {
            copy16_async(to[0] + at, from + at);
            copy16_async(to[1] + at, from + split.layer.v_codes + at);
        }
    }
    commit_copies();
}

ANTKV_DEVICE const i16* anchor_offsets(const Split& split, const u8* page) {
    return (const i16*)(page + split.layer.anchor_offsets);
}

ANTKV_DEVICE Ahead look_ahead(const Split& split, const u8* page, int token) {
    Ahead ahead = {page, -1, -1, -1};
    if (!page) return ahead;
    const int own = token + split.lane.index, rows = split.layer.anchor_rows;
    if (own < split.end) ahead.last_query = split.layer.last_query[own];
    // A query sees the anchors of the blocks before its own.
    if (token / kBlockSize < split.position / kBlockSize && split.lane.index < rows) {
        ahead.k_anchor = anchor_offsets(split, page)[split.lane.index];
        ahead.v_anchor = anchor_offsets(split, page)[rows + split.lane.index];
    }
    return ahead;
}

// --- What is kept beside the codes.

// A lane's part of a correction of K: neighbouring channels.
struct KeyPart {
    static constexpr int kChannels = kHeadSize / kWarp;
    u32 word;
    ANTKV_DEVICE static KeyPart load(const u8* row, Lane lane) {
        const u8* at = row + lane.index * kChannels;
        if constexpr (kChannels == 4) return {load_global((const u32*)at)};
        return {load_global((const u16*)at)};
    }
};

// A lane's part of a correction of V: the channels whose sums it has.
struct ValuePart {
    static constexpr int kChunks = kOwnSets == 1 ? 1 : kOwnSets / 2;
    uint2 quads[kChunks];  // of two sets each
    ANTKV_DEVICE static ValuePart load(const u8* row, Lane lane) {
        ValuePart part;
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int set = kOwnSets == 1 ? 2 * lane.column % kSets : 2 * chunk;
            part.quads[chunk] = load_global((const uint2*)(row + Tables::value_quad(lane.row, set) * 4));
        }
        return part;
    }
};

// Of 32 anchor rows (K or V), those of the warp's tokens.
constexpr int kEarly = 2;
template <typename Part>
struct Anchors {
    const u8* rows;
    u32 hits;
    int at;              // token of anchor row `lane`
    Part early[kEarly];  // of the first hits: their loads are under way
};

template <typename Part>
ANTKV_DEVICE Anchors<Part> find_anchors(const Split& split, int token, int offset, const u8* rows) {
    Anchors<Part> anchors = {rows, 0, offset - token % kBlockSize, {}};
    anchors.hits = ballot_warp(anchors.at >= 0 && anchors.at < kTokens);
    u32 left = anchors.hits;
    for (int i = 0; i < kEarly; ++i, left &= left - 1)
        if (left) anchors.early[i] = Part::load(rows + first_bit(left) * kHeadSize, split.lane);
    return anchors;
}

// Offset of anchor row `first + lane`. kind: 0 for K, 1 for V.
ANTKV_DEVICE int anchor_offset(const Split& split, const Ahead& ahead, int first, int kind) {
    if (first == 0) return kind ? ahead.v_anchor : ahead.k_anchor;
    const int rows = split.layer.anchor_rows, row = first + split.lane.index;
    return row < rows ? anchor_offsets(split, ahead.page)[kind * rows + row] : -1;
}

// Calls `add(token, part)` for the anchors whose tokens are not in `exact`.
template <typename Part, typename Add>
ANTKV_DEVICE void for_anchors(const Split& split, const Anchors<Part>& anchors, u32 exact, Add add) {
    int n = 0;
    for (u32 left = anchors.hits; left; left &= left - 1, ++n) {
        const int anchor = first_bit(left), token = from_lane(anchors.at, anchor);
        if (exact >> token & 1) continue;
        Part part = n == 0 ? anchors.early[0] : anchors.early[1];
        if (n >= kEarly) part = Part::load(anchors.rows + anchor * kHeadSize, split.lane);
        add(token, part);
    }
}

// Four channels of a correction, 1/256 of their value.
ANTKV_DEVICE float4 widen_correction(u32 word) {
    const Quad quad = widen_e4m3(word);
    return {f16_to_float((u16)quad.low), f16_to_float((u16)(quad.low >> 16)), f16_to_float((u16)quad.high),
            f16_to_float((u16)(quad.high >> 16))};
}

// exact: the tokens of the warp that have rows in full precision.
ANTKV_DEVICE KeptRows kept_rows(const Split& split, const Ahead& ahead, int token, u32& exact) {
    const Layer& layer = split.layer;
    const int own = token + split.lane.index;
    KeptRows rows = {};
    // `last_query` of the query's own token is not before it.
    const bool has_row = own < split.end && ahead.last_query >= split.position;
    exact = ballot_warp(has_row);
    if (!exact) return rows;
    if (has_row && own < split.position) {
        const u8* key = recency_row(layer, split.step, split.request, split.head, own);
        if (key) rows = {key, key + layer.recency_v};
    } else if (has_row) {
        rows = {(const u8*)split.key.at(split.hand, split.head), (const u8*)split.value.at(split.hand, split.head)};
    }
    exact = ballot_warp(rows.key);
    return rows;
}

// 16 bytes of a row, or zeros where there is none.
ANTKV_DEVICE uint4 load16(const u8* row, int offset) {
    return row ? *(const uint4*)(row + offset) : uint4{0, 0, 0, 0};
}

template <bool kBrain>
ANTKV_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kBrain)
        mma_bf16(c, a, b0, b1);
    else
        mma_f16(c, a, b0, b1);
}
