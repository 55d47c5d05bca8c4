// What is kept beside the codes of a tile: anchors of closed blocks, and rows in full precision.
#pragma once

#include "split.cuh"

// The page with its anchors, which lie in global memory where a span has no room for them. Which it is must be known here:
// addresses in shared memory are half as long.
ANTKV_DEVICE const u8* anchor_page(const Tile& tile) {
    const int page = tile.warp / kTilesPerPage;
    if constexpr (kStagesAnchors) return tile.span.pages[page];
    else return tile.span.pages_at[page];
}

// A query sees the anchors of the blocks before its own.
ANTKV_DEVICE int visible_anchors(const Tile& tile) {
    return tile.token / kBlockSize < tile.position / kBlockSize ? tile.in.layer.anchor_rows : 0;
}

// Of 16 anchor rows of K and as many of V, those of the tile's tokens.
constexpr int kAnchorsAtOnce = 16;
struct Anchors {
    int at;     // the token of anchor row `first + lane % 16`, of K in the lower half of the lanes
    u32 hits;   // lanes whose tokens are in the tile
    u32 exact;  // lanes with `kExactAnchor` more than such a token
    bool are_more;

    ANTKV_DEVICE bool of_keys() const { return (hits & 0xffff) || are_more; }
    ANTKV_DEVICE bool of_values() const { return hits >> kAnchorsAtOnce || are_more; }
};

ANTKV_DEVICE Anchors find_anchors(const Tile& tile, int first) {
    const int row = first + tile.lane.index % kAnchorsAtOnce, kind = tile.lane.index / kAnchorsAtOnce;
    const int num_rows = visible_anchors(tile);
    const i16* offsets = (const i16*)(anchor_page(tile) + tile.in.layer.anchor_offsets) + kind * tile.in.layer.anchor_rows;
    const int at = row < num_rows ? offsets[row] - tile.token % kBlockSize : -1;
    const u32 hits = ballot_warp((u32)at < kTokens), exact = ballot_warp((u32)(at - kExactAnchor) < kTokens);
    return {at, hits, exact, !kStagesAnchors && num_rows - first > kAnchorsAtOnce};
}

// The row in full precision of a lane's token, which takes the place of its code; null where the query sees the code.
struct ExactRow {
    const u8 *key, *value;
};

// Stands for a row whose page is the null block, which no allocator of pages may let happen.
ANTKV_GLOBAL const uint4 kZeros[kRowBytes / 16] = {};

// exact: of the tile's tokens. A missing row is zeros, and marks its request.
ANTKV_DEVICE ExactRow find_row(const Tile& tile, u32 exact) {
    const SplitDesc& desc = tile.span.desc;
    const int own = tile.token + tile.lane.index;
    const bool has_row = exact >> tile.lane.index & 1;
    ExactRow row = {};
    if (has_row && own < tile.position) {
        const u8* key = recency_row(tile.in.layer, tile.in.step, desc.request, tile.in.head, own);
        row = {key, key + tile.in.layer.recency_v};
        if (!key) {
            row = {(const u8*)kZeros, (const u8*)kZeros};
            set_flag(tile.in.layer.missing_rows + desc.request);
        }
    } else if (has_row) {
        const i64 token = desc.query_row;
        row = {(const u8*)tile.in.key.at(token, tile.in.head), (const u8*)tile.in.value.at(token, tile.in.head)};
    }
    return row;
}

// Anchors that are kept as they are, too. `anchors` are the first of them.
ANTKV_DEVICE void find_exact_anchors(const Tile& tile, Anchors anchors, ExactRow& row) {
    const Layer& layer = tile.in.layer;
    for (int first = 0;; first += kAnchorsAtOnce, anchors = find_anchors(tile, first)) {
        for (u32 left = anchors.exact; left; left &= left - 1) {
            const int from = first_bit(left);
            if (from_lane(anchors.at, from) - kExactAnchor != tile.lane.index) continue;
            const u8* at = anchor_page(tile) + (first + from % kAnchorsAtOnce) * kHeadSize;
            if (from < kAnchorsAtOnce)
                row.key = at + layer.k_anchors;
            else
                row.value = at + layer.v_anchors;
        }
        if (!anchors.are_more) return;
    }
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
