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

// Give each anchor row to the lane of its token.
ANTKV_DEVICE void take_anchors(const Split& split, int token, int offset, const u8* first_row, const u8*& row) {
    const int at = offset - token % kBlockSize;
    u32 hits = ballot_warp(at >= 0 && at < kTokens);
    while (hits) {
        const int anchor = first_bit(hits);
        hits &= hits - 1;
        if (from_lane(at, anchor) == split.lane.index) row = first_row + anchor * kHeadSize;
    }
}

ANTKV_DEVICE KeptRows kept_rows(const Split& split, const Ahead& ahead, int token) {
    const Layer& layer = split.layer;
    const int own = token + split.lane.index;
    KeptRows rows = {};
    if (token / kBlockSize < split.position / kBlockSize) {
        for (int first = 0; first < layer.anchor_rows; first += kWarp) {
            int k_anchor = ahead.k_anchor, v_anchor = ahead.v_anchor;
            if (first) {
                const bool some = first + split.lane.index < layer.anchor_rows;
                const i16* offsets = anchor_offsets(split, ahead.page) + first + split.lane.index;
                k_anchor = some ? offsets[0] : -1;
                v_anchor = some ? offsets[layer.anchor_rows] : -1;
            }
            take_anchors(split, token, k_anchor, ahead.page + layer.k_anchors + first * kHeadSize, rows.key);
            take_anchors(split, token, v_anchor, ahead.page + layer.v_anchors + first * kHeadSize, rows.value);
        }
        rows.corrects_key = rows.key;
        rows.corrects_value = rows.value;
    }
    if (own < split.position && ahead.last_query >= split.position) {
        const u8* key = recency_row(layer, split.step, split.request, split.head, own);
        rows = {key, key + layer.recency_v, false, false};
    }
    if (own == split.position) {
        const u8* key = (const u8*)split.key.at(split.hand, split.head);
        rows = {key, (const u8*)split.value.at(split.hand, split.head), false, false};
    }
    // Whatever was said of a token that is not there yet.
    return own < split.end ? rows : KeptRows{};
}

// 16 bytes of a row, or zeros where there is none.
ANTKV_DEVICE uint4 load16(const u8* row, int offset) {
    return row ? *(const uint4*)(row + offset) : uint4{0, 0, 0, 0};
}

// Four channels of a correction in the model dtype.
ANTKV_DEVICE Quad widen_correction(u32 word) {
    constexpr u32 kUnit = 0x5c005c00u;  // 256, twice
    static_assert(kFp8Unit == 256);
    Quad quad = widen_e4m3(word);
    quad = {mul_f16x2(quad.low, kUnit), mul_f16x2(quad.high, kUnit)};
    if constexpr (!kBFloat16) return quad;
    const auto to_bf16 = [](u32 pair) { return pack_bf16(f16_to_float((u16)pair), f16_to_float((u16)(pair >> 16))); };
    return {to_bf16(quad.low), to_bf16(quad.high)};
}

// Eight channels of what is kept of a token, in the model dtype; zeros where nothing is.
ANTKV_DEVICE uint4 load_kept(const u8* row, bool corrects, int channel) {
    if (!corrects) return load16(row, channel * 2);
    const uint2 words = *(const uint2*)(row + channel);
    const Quad first = widen_correction(words.x), second = widen_correction(words.y);
    return {first.low, first.high, second.low, second.high};
}

template <bool kBrain>
ANTKV_DEVICE void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kBrain)
        mma_bf16(c, a, b0, b1);
    else
        mma_f16(c, a, b0, b1);
}
