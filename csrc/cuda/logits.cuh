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
ANTKV_DEVICE void add_key_quads(const Quad (&rows)[kRowsPerLane], const uint2 (*query)[kQuads], int quad, Lane lane,
                                float (&logits)[kTiles][kKeyGroups][4]) {
    for (int group = 0; group < kKeyGroups; ++group) {
        const int q = group * kKeyColumns + lane.row / Tables::kOrders;
        const uint2 b = query[q < kGroup ? q : kGroup - 1][quad];
        for (int tile = 0; tile < kTiles; ++tile) {
            const Quad &upper = rows[2 * tile], &lower = rows[2 * tile + 1];
            const u32 a[4] = {upper.low, lower.low, upper.high, lower.high};
            mma_f16(logits[tile][group], a, b.x, b.y);
        }
    }
}

ANTKV_DEVICE void coded_logits(const Split& split, const Rotation& rotation, int buffer) {
    const Lane lane = split.lane;
    const Tables& tables = split.tables;
    const u8* codes = ((const Staging*)split.shared.staging)->codes[split.warp][buffer][0];
    const uint2(*query)[kQuads] = split.shared.query[buffer];
    Tables::KeyCodes words[kRowsPerLane];
    for (int row = 0; row < kRowsPerLane; ++row)
        words[row] = tables.key_codes(codes + (row * 8 + lane.row) * kCodeBytes);
    float logits[kTiles][kKeyGroups][4] = {};
    const int order = lane.row % Tables::kOrders;
#pragma unroll
    for (int j = 0; j < kPairs; j += Tables::kKeysAtOnce) {
        Tables::KeyLoad first[kRowsPerLane], second[kRowsPerLane];
        for (int row = 0; row < kRowsPerLane; ++row) {
            first[row] = tables.load_keys(words[row], j, false);
            second[row] = tables.load_keys(words[row], j, true);
        }
        for (int i = 0; i < Tables::kKeysAtOnce; ++i) {
            Quad low[kRowsPerLane], high[kRowsPerLane];
            for (int row = 0; row < kRowsPerLane; ++row) {
                low[row] = first[row].quads[i], high[row] = second[row].quads[i];
                turn(low[row], high[row], rotation.cosine[row][j + i], rotation.sine[row][j + i]);
            }
            // A column of B needs the channels that the rows of its order have at this step.
            add_key_quads(low, query, Tables::key_quad(lane.column, order, j + i, false), lane, logits);
            add_key_quads(high, query, Tables::key_quad(lane.column, order, j + i, true), lane, logits);
        }
    }
    // Of the columns of a query, one has the order of the row.
    for (int i = 0; i < 2; ++i) {
        const int column = lane.column * 2 + i;
        if (column % Tables::kOrders != order) continue;
        for (int group = 0; group < kKeyGroups; ++group) {
            const int q = group * kKeyColumns + column / Tables::kOrders;
            if (q >= kGroup) continue;
            for (int row = 0; row < kRowsPerLane; ++row)
                split.shared.logits[split.warp][q][row * 8 + lane.row] = logits[row / 2][group][row % 2 * 2 + i];
        }
    }
}

ANTKV_DEVICE void kept_logits(const Split& split, const u8* own_row, int tile) {
    const Lane lane = split.lane;
    const u8* rows[2];
    for (int i = 0; i < 2; ++i) rows[i] = (const u8*)from_lane((i64)own_row, tile * 16 + i * 8 + lane.row);
    float logits[kExactGroups][4] = {};
#pragma unroll
    for (int channel = 0; channel < kHeadSize; channel += 32) {
        const int own = channel + lane.column * 8;
        const uint4 upper = load16(rows[0], own * 2), lower = load16(rows[1], own * 2);
        const u32 first[4] = {upper.x, lower.x, upper.y, lower.y}, second[4] = {upper.z, lower.z, upper.w, lower.w};
        for (int group = 0; group < kExactGroups; ++group) {
            const uint4 b = load16((const u8*)query_row(split, group * 8 + lane.row), own * 2);
            multiply<kBFloat16>(logits[group], first, b.x, b.y);
            multiply<kBFloat16>(logits[group], second, b.z, b.w);
        }
    }
    for (int group = 0; group < kExactGroups; ++group) {
        for (int i = 0; i < 4; ++i) {
            const int q = group * 8 + lane.column * 2 + i % 2;
            if (q >= kGroup || !rows[i / 2]) continue;
            split.shared.logits[split.warp][q][tile * 16 + i / 2 * 8 + lane.row] =
                logits[group][i] * (split.layer.scale * kLog2E);
        }
    }
}

constexpr int padded_group() {
    int size = 1;
    while (size < kGroup) size *= 2;
    return size;
}

// The sums over the warp of a number per query; lane `q * (32 / kPadded)` gets the one of query q.
constexpr int kPadded = padded_group();
ANTKV_DEVICE float sums_of_warp(float (&own)[kPadded], Lane lane) {
    int mask = kWarp / 2;
#pragma unroll
    for (int size = kPadded / 2; size; size /= 2, mask /= 2) {
#pragma unroll
        for (int i = 0; i < size; ++i) {
            const bool upper = lane.index & mask;
            const float send = upper ? own[i] : own[i + size], keep = upper ? own[i + size] : own[i];
            own[i] = keep + from_lane_xor(send, mask);
        }
    }
    for (; mask; mask /= 2) own[0] += from_lane_xor(own[0], mask);
    return own[0];
}

// What anchors add to logits: a lane has a few channels, for all queries.
ANTKV_DEVICE void correct_logits(const Split& split, const Anchors<KeyPart>& anchors, u32 exact) {
    const Lane lane = split.lane;
    for_anchors(split, anchors, exact, [&](int token, KeyPart part) {
        const float4 channels = widen_correction(part.word);
        float products[kPadded] = {};
        for (int q = 0; q < kGroup; ++q) {
            const float* raw = &split.shared.raw[q][lane.index * KeyPart::kChannels];
            if constexpr (KeyPart::kChannels == 4) {
                const float4 own = *(const float4*)raw;
                products[q] = own.x * channels.x + own.y * channels.y + own.z * channels.z + own.w * channels.w;
            } else {
                const float2 own = *(const float2*)raw;
                products[q] = own.x * channels.x + own.y * channels.y;
            }
        }
        const float sum = sums_of_warp(products, lane);
        const int q = lane.index / (kWarp / kPadded);
        if (lane.index % (kWarp / kPadded) == 0 && q < kGroup) split.shared.logits[split.warp][q][token] += sum;
    });
}
