// What is kept beside the codes of a tile: anchors of closed blocks, and rows in full precision.
#pragma once

#include "split.cuh"

// The page with its anchors, which lie in global memory where a span has no room for them.
ANTKV_DEVICE const u8* anchor_page(const Tile& tile) {
    const int page = tile.warp / kTilesPerPage;
    return tile.in.layer.staged_bytes > 2 * kCodeSection ? tile.span.pages[page] : tile.span.pages_at[page];
}

// Of 16 anchor rows of K and as many of V, those of the tile's tokens.
constexpr int kAnchorsAtOnce = 16;
struct Anchors {
    const u8* page;
    int first, num_rows;
    int at;    // the token of anchor row `first + lane % 16`, of K in the lower half of the lanes
    u32 hits;  // lanes whose tokens are in the tile, and not seen in full precision

    ANTKV_DEVICE Anchors(const Tile& tile, u32 exact) : page(anchor_page(tile)), first(0) {
        // A query sees the anchors of the blocks before its own.
        const bool closed = tile.token / kBlockSize < tile.span.work.position / kBlockSize;
        num_rows = closed ? tile.in.layer.anchor_rows : 0;
        find(tile, exact);
    }
    ANTKV_DEVICE void find(const Tile& tile, u32 exact) {
        const Layer& layer = tile.in.layer;
        const int row = first + tile.lane.index % kAnchorsAtOnce, kind = tile.lane.index / kAnchorsAtOnce;
        const i16* offsets = (const i16*)(page + layer.anchor_offsets) + kind * layer.anchor_rows;
        at = row < num_rows ? offsets[row] - tile.token % kBlockSize : -1;
        hits = ballot_warp(at >= 0 && at < kTokens && !(exact >> at % kTokens & 1));
    }
    // Few blocks have more than 16.
    ANTKV_DEVICE bool next(const Tile& tile, u32 exact) {
        first += kAnchorsAtOnce;
        if (first >= num_rows) return false;
        find(tile, exact);
        return true;
    }
};

// The row in full precision of a lane's token, which takes the place of its code; null where the query sees the code.
struct ExactRow {
    const u8 *key, *value;
};

// exact: of the tile's tokens; those whose pages are gone are taken out.
ANTKV_DEVICE ExactRow find_row(const Tile& tile, u32& exact) {
    const Work& work = tile.span.work;
    const int own = tile.token + tile.lane.index;
    const bool has_row = exact >> tile.lane.index & 1;
    ExactRow row = {};
    if (has_row && own < work.position) {
        const u8* key = recency_row(tile.in.layer, tile.in.step, work.request, tile.in.head, own);
        if (key) row = {key, key + tile.in.layer.recency_v};
    } else if (has_row) {
        row = {(const u8*)tile.in.key.at(work.hand, tile.in.head), (const u8*)tile.in.value.at(work.hand, tile.in.head)};
    }
    exact = ballot_warp(row.key);
    return row;
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
