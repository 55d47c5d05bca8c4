// Products of the queries with the K rows of a warp's 32 tokens, from codes and from what is kept beside them.
#pragma once

#include "rows.cuh"

ANTKV_DEVICE void turn(Quad& first, Quad& second, const u32 (&cosine)[2], const u32 (&sine)[2]) {
    const Quad a = first, b = second;
    first.low = fma_f16x2(neg_f16x2(b.low), sine[0], mul_f16x2(a.low, cosine[0]));
    first.high = fma_f16x2(neg_f16x2(b.high), sine[1], mul_f16x2(a.high, cosine[1]));
    second.low = fma_f16x2(a.low, sine[0], mul_f16x2(b.low, cosine[0]));
    second.high = fma_f16x2(a.high, sine[1], mul_f16x2(b.high, cosine[1]));
}

// A product of two K rows, 8 tokens apart, with all queries; columns of B are (query, order).
ANTKV_DEVICE void add_key_quads(const Quad (&rows)[2], const uint2 (*query)[kQueryQuads], int quad, Lane lane,
                                float (&logits)[kKeyGroups][4]) {
    for (int group = 0; group < kKeyGroups; ++group) {
        const int q = group * kKeyColumns + lane.row / Tables::kOrders;
        const uint2 b = query[q < kGroup ? q : kGroup - 1][quad];
        const u32 a[4] = {rows[0].low, rows[1].low, rows[0].high, rows[1].high};
        mma_f16(logits[group], a, b.x, b.y);
    }
}

// Of a half of the tile, 16 tokens: what the tables fetch ahead for the lane's two rows.
struct Keys {
    Tables::KeyRow rows[2];
};
ANTKV_DEVICE Keys fetch_keys(const Tile& tile, int half) {
    Keys keys;
    for (int row = 0; row < 2; ++row)
        keys.rows[row] = tile.tables.fetch_key(tile.codes() + (half * 16 + row * 8 + tile.lane.row) * kCodeBytes);
    return keys;
}

ANTKV_DEVICE void coded_logits(const Tile& tile, const Rotation& rotation, int half, const Keys& keys) {
    const Lane lane = tile.lane;
    const Tables& tables = tile.tables;
    const uint2(*query)[kQueryQuads] = tile.span.query[half];
    // An mma waits for the one before it in its sum: where there is one group alone, it has two sums.
    constexpr int kLast = kKeyGroups == 1;
    float logits[kLast + 1][kKeyGroups][4] = {};
    const int order = lane.row % Tables::kOrders;
#pragma unroll
    for (int j = 0; j < kPairs; j += Tables::kKeysAtOnce) {
        Tables::KeyLoad first[2], second[2];
        for (int row = 0; row < 2; ++row) {
            first[row] = tables.load_keys(keys.rows[row], j, false);
            second[row] = tables.load_keys(keys.rows[row], j, true);
        }
        for (int i = 0; i < Tables::kKeysAtOnce; ++i) {
            Quad low[2], high[2];
            for (int row = 0; row < 2; ++row) {
                low[row] = Tables::key_operand(first[row], i), high[row] = Tables::key_operand(second[row], i);
                turn(low[row], high[row], rotation.cosine[row][j + i], rotation.sine[row][j + i]);
            }
            // A column of B needs the channels that the rows of its order have at this step.
            add_key_quads(low, query, Tables::key_quad(lane.column, order, j + i, false), lane, logits[0]);
            add_key_quads(high, query, Tables::key_quad(lane.column, order, j + i, true), lane, logits[kLast]);
        }
    }
    // Of the columns of a query, one has the order of the row.
    for (int i = 0; i < 2; ++i) {
        const int column = lane.column * 2 + i;
        if (column % Tables::kOrders != order) continue;
        for (int group = 0; group < kKeyGroups; ++group) {
            const int q = group * kKeyColumns + column / Tables::kOrders;
            if (q >= kGroup) continue;
            for (int row = 0; row < 2; ++row) {
                float logit = logits[0][group][row * 2 + i];
                if (kLast) logit += logits[kLast][group][row * 2 + i];
                tile.logits()[q][half * 16 + row * 8 + lane.row] = logit;
            }
        }
    }
}

// own_row: of the lane's token, or null. half: of the tile.
ANTKV_DEVICE void exact_logits(const Tile& tile, const u8* own_row, int half) {
    const Lane lane = tile.lane;
    const u8* rows[2];
    for (int i = 0; i < 2; ++i) rows[i] = (const u8*)from_lane((i64)own_row, half * 16 + i * 8 + lane.row);
    float logits[kExactGroups][4] = {};
#pragma unroll
    for (int channel = 0; channel < kHeadSize; channel += 32) {
        const int own = channel + lane.column * 8;
        const uint4 upper = load16(rows[0], own * 2), lower = load16(rows[1], own * 2);
        const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
        for (int group = 0; group < kExactGroups; ++group) {
            const int q = group * 8 + lane.row;
            const uint4 b = load16((const u8*)tile.span.raw[q < kGroup ? q : kGroup - 1], own * 2);
            multiply<kBFloat16>(logits[group], first, b.x, b.y);
            multiply<kBFloat16>(logits[group], second, b.z, b.w);
        }
    }
    for (int group = 0; group < kExactGroups; ++group) {
        for (int i = 0; i < 4; ++i) {
            const int q = group * 8 + lane.column * 2 + i % 2;
            if (q >= kGroup || !rows[i / 2]) continue;
            tile.logits()[q][half * 16 + i / 2 * 8 + lane.row] = logits[group][i] * (tile.in.layer.scale * kLog2E);
        }
    }
}

// What 8 anchors add to logits: their rows are the upper ones of A, the queries as they are B. A lane has every fourth 8
// channels of row `first` + its own. lanes: of `anchors`, the first of them.
ANTKV_DEVICE void correct_logits(const Tile& tile, Anchors anchors, int lanes, int first, u32 exact) {
    const Lane lane = tile.lane;
    const int token = from_lane(anchors.at, lanes + lane.row);
    const bool hit = (anchors.hits >> (lanes + lane.row) & 1) && !(exact >> token & 1);
    const u8* row = anchor_page(tile) + tile.in.layer.k_anchors + (first + lane.row) * kHeadSize;
    float logits[kExactGroups][4] = {};
#pragma unroll
    for (int channel = 0; channel < kHeadSize; channel += 32) {
        const int own = channel + lane.column * 8;
        const uint2 words = hit ? *(const uint2*)(row + own) : uint2{0, 0};
        const Quad low = widen_e4m3(words.x), high = widen_e4m3(words.y);
        const u32 a[2][4] = {{low.low, 0, low.high, 0}, {high.low, 0, high.high, 0}};
        for (int group = 0; group < kExactGroups; ++group) {
            const int q = group * 8 + lane.row;
            const uint4 b = *(const uint4*)&tile.span.plain[q < kGroup ? q : kGroup - 1][own];
            mma_f16(logits[group], a[0], b.x, b.y);
            mma_f16(logits[group], a[1], b.z, b.w);
        }
    }
    for (int group = 0; group < kExactGroups; ++group) {
        for (int i = 0; i < 2; ++i) {
            const int q = group * 8 + lane.column * 2 + i;
            if (hit && q < kGroup) tile.logits()[q][token] += logits[group][i] * kFp8Unit;
        }
    }
}
