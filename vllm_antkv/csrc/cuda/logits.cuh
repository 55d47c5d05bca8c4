// Products of the queries with the K rows of a warp's 32 tokens, from codes and from what is kept beside them.
#pragma once

#include "rows.cuh"

ANTKV_DEVICE void rotate(Quad& first, Quad& second, const u32 (&cosine)[2], const u32 (&sine)[2]) {
    const Quad a = first, b = second;
    first.low = fma_f16x2(neg_f16x2(b.low), sine[0], mul_f16x2(a.low, cosine[0]));
    first.high = fma_f16x2(neg_f16x2(b.high), sine[1], mul_f16x2(a.high, cosine[1]));
    second.low = fma_f16x2(a.low, sine[0], mul_f16x2(b.low, cosine[0]));
    second.high = fma_f16x2(a.high, sine[1], mul_f16x2(b.high, cosine[1]));
}

// A product of two K rows, 8 tokens apart, with all queries; columns of B are (query, order). A column needs the channels
// that the rows of its order have at this step.
ANTKV_DEVICE void add_key_quads(const Tile& tile, const Quad (&rows)[2], const uint2 (*query)[kQueryQuads], int j,
                                bool second, float (&logits)[kKeyGroups][4]) {
    for (int group = 0; group < kKeyGroups; ++group) {
        const int q = group * kKeyColumns + tile.lane.row / Tables::kOrders;
        const u8* row = (const u8*)query[q < kGroup ? q : kGroup - 1];
        const uint2 b = *(const uint2*)(row + tile.tables.query_offset(tile.lane, j, second, is_turned(group)));
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

ANTKV_DEVICE void coded_logits(const Tile& tile, const Rotation& rotation, int half, const Keys& keys, Logits& own) {
    const Lane lane = tile.lane;
    const Tables& tables = tile.tables;
    const uint2(*query)[kQueryQuads] = tile.span.query[half];
    // An mma waits for the one before it in its sum: where there is one group alone, it has two sums.
    constexpr int kLast = kKeyGroups == 1;
    float logits[kLast + 1][kKeyGroups][4] = {};
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
                rotate(low[row], high[row], rotation.cosine[row][j + i], rotation.sine[row][j + i]);
            }
            add_key_quads(tile, low, query, j + i, false, logits[0]);
            add_key_quads(tile, high, query, j + i, true, logits[kLast]);
        }
    }
    if (kLast)
        for (int i = 0; i < 4; ++i) logits[0][0][i] += logits[kLast][0][i];
    for (int i = 0; i < kOwnQueries; ++i) {
        const bool second = own_column(lane, i) % 2;
        for (int row = 0; row < 2; ++row) {
            float* to = &own.of[i][half * 2 + row];
            for (int group = 0; group < kKeyGroups; ++group) {
                const float(&x)[4] = logits[0][group];
                if (group == 0 || group == own_group(lane, i)) *to = second ? x[row * 2 + 1] : x[row * 2];
            }
        }
    }
}

// Through shared memory, where other lanes correct them.
ANTKV_DEVICE void put_logits(const Tile& tile, const Logits& logits) {
    const Lane lane(opaque((u32)tile.lane.index));
    for (int i = 0; i < kOwnQueries; ++i) {
        const int q = own_query(lane, i);
        const float(&x)[4] = logits.of[i];
        if (q < kGroup) *(float4*)&tile.logits()[q][place_of(q, lane.row)] = {x[0], x[1], x[2], x[3]};
    }
}
ANTKV_DEVICE void take_logits(const Tile& tile, Logits& logits) {
    const Lane lane(opaque((u32)tile.lane.index));
    for (int i = 0; i < kOwnQueries; ++i) {
        const int q = own_query(lane, i);
        if (q >= kGroup) continue;
        const float4 x = *(const float4*)&tile.logits()[q][place_of(q, lane.row)];
        logits.of[i][0] = x.x, logits.of[i][1] = x.y, logits.of[i][2] = x.z, logits.of[i][3] = x.w;
    }
}

// What `exact_logits` takes off, a token per lane: there it would cost registers.
ANTKV_DEVICE void put_bias(const Tile& tile, u32 exact) {
    const u32 token = tile.lane.index;
    if (!(exact >> token & 1)) return;
    for (u32 q = 0; q < kGroup; ++q) tile.logits()[q][place_of(q, token)] = tile.span.bias[q];
}

// own_row: of the lane's token, or null. half: of the tile. Behind `put_bias`.
ANTKV_DEVICE void exact_logits(const Tile& tile, const u8* own_row, int half) {
    const Lane lane(opaque((u32)tile.lane.index));
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
            const int place = place_of(q, half * 16 + i / 2 * 8 + lane.row);
            float* to = &tile.logits()[q][place];
            *to = logits[group][i] * (tile.in.layer.scale * kLog2E) - *to;
        }
    }
}

// What 8 anchors add to logits: their rows are the upper ones of A, the queries as they are B. A lane has every fourth 8
// channels of row `first` + its own. lanes: of `anchors`, the first of them.
ANTKV_DEVICE void correct_logits(const Tile& tile, Anchors anchors, int lanes, int first, u32 exact) {
    const Lane lane(opaque((u32)tile.lane.index));
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
            if (hit && q < kGroup)
                tile.logits()[q][place_of(q, token)] += logits[group][i] * kFp8Unit - tile.span.bias[q];
        }
    }
}
