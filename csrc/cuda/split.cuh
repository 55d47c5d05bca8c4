// What decoding a split has in shared memory and in registers, and what a lane knows before it reads any code.
#pragma once

#include "tables.cuh"

constexpr int kWarps = ANTKV_WARPS;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTiles = 2;                    // of 16 tokens, per warp: halves the reads of the query
constexpr int kTokens = 16 * kTiles;         // a warp's: one per lane
constexpr int kSpan = kWarps * kTokens;      // tokens of all warps together
constexpr int kRowsPerLane = 2 * kTiles;     // K rows of a lane: 8 apart
constexpr int kKeyColumns = 8 / kOrders;     // queries in the 8 columns of mma's B, for K
constexpr int kKeyGroups = (kGroup + kKeyColumns - 1) / kKeyColumns;
constexpr int kValueColumns = 8 / kSets;     // and for V
constexpr int kValueGroups = (kGroup + kValueColumns - 1) / kValueColumns;
constexpr int kExactGroups = (kGroup + 7) / 8;
constexpr int kKeyCodes = kPairs * 4 / kSubVector;   // neighbouring codes that a lane reads of a row
constexpr int kValueCodes = kSets * 4 / kSubVector;
constexpr float kLog2E = 1.4426950408889634f;
// The maximum that weights are relative to moves when a logit passes it by this much: 2^8 fits float16, and it is rare.
constexpr float kSlack = 8.0f;

struct Staging {
    u8 codes[kWarps][2][2][kTokens * kCodeBytes];  // [warp][buffer][K, V]
};
struct Merging {
    float output[kWarps][kValueColumns][kHeadSize];
};
ANTKV_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// Shared memory behind the tables.
struct Shared {
    uint2 query[2][kGroup][kQuads];        // turned back, float16; one buffer per span
    float logits[kWarps][kGroup][kTokens];
    u16 weights[kWarps][2][kGroup][kTokens];  // [coded, exact], tokens in the order of mma's B
    float statistics[kWarps][kGroup][2];   // maximum and sum of each warp
    alignas(16) u8 staging[larger(sizeof(Staging), sizeof(Merging))];
};

static_assert(kStagedBytes + sizeof(Shared) == ANTKV_DECODE_SHARED, "vllm_antkv/ops/cuda.py counts otherwise");

struct Rotation {
    u32 cosine[kRowsPerLane][kPairs][2], sine[kRowsPerLane][kPairs][2];  // float16 pairs of channels
};

// Where a lane reads, which depends on no code.
struct Columns {
    u32 key[kPairs][2], key_selector[kPairs];
    u32 value[kSets], value_selector[kSets], value_scale[kSets];
    int key_codes[2], value_codes;  // offsets in a row of codes
};

// What a warp has added up.
struct Sums {
    float output[kValueGroups][2][4];
    float maximum[kGroup], total[kGroup];  // `total` is of the lane's own tokens
};

// The full-precision rows of a lane's token, null where the query sees its code.
struct ExactRows {
    const u8 *key, *value;
};

// What was loaded ahead of a tile's turn.
struct Ahead {
    const u8* page;
    i32 last_query;
    i32 k_anchor, v_anchor;  // offset in the block of anchor row `lane`
};

struct Split {
    const Layer& layer;
    const Step& step;
    Shared& shared;
    const u8* tables;
    const Rows query, key, value;
    const int head, request, begin, end, position, hand;  // `position` of the query, row `hand` of the step's tensors
    const Lane lane;
    const int warp;
};

ANTKV_DEVICE Columns lane_columns(const Layer& layer, int head, Lane lane) {
    Columns columns;
    const int order = lane.row % kOrders;
    const bool swapped = kPairs == 2 && (order & 2);
    for (int j = 0; j < kPairs; ++j) {
        for (int second = 0; second < 2; ++second)
            columns.key[j][second] = key_quad(lane.column, order, j, second) * kQuadBytes;
        columns.key_selector[j] = code_selector(key_quad(lane.column, order, j, false) % kPairs * 4 / kSubVector);
    }
    for (int second = 0; second < 2; ++second)
        columns.key_codes[second] = lane.column * kKeyCodes + ((second != 0) != swapped ? kSubVectors / 2 : 0);
    for (int i = 0; i < kSets; ++i) {
        const int set = value_set(lane.column, i), quad = value_quad(lane.row, set);
        columns.value[i] = quad * kQuadBytes + kValueColumn % kTableBytes;
        columns.value_selector[i] = code_selector(set * 4 / kSubVector);
        if constexpr (kFp8) {
            const float scale = layer.v_scales[head * kSubVectors + quad * 4 / kSubVector] * kFp8Unit;
            columns.value_scale[i] = pack_f16(scale, scale);
        }
    }
    columns.value_codes = lane.row * kValueCodes;
    return columns;
}

// Cosines and sines of the offsets of the lane's rows. The scales of FP8 tables, which the channels of a rotary pair
// share, ride on them.
ANTKV_DEVICE Rotation lane_rotation(const Layer& layer, int head, Lane lane, int warp) {
    Rotation rotation;
    const int order = lane.row % kOrders;
    const float sign = kPairs == 2 && (order & 2) ? -1 : 1;
#pragma unroll
    for (int row = 0; row < kRowsPerLane; ++row) {
        const int offset = warp * kTokens + row * 8 + lane.row;
        const i64 angles = (i64)(offset < layer.rotary_rows ? offset : 0) * (kHeadSize / 2);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int quad = key_quad(lane.column, order, j, false) % (kQuads / 2);
            float scale = 1;
            if constexpr (kFp8) scale = layer.k_scales[head * kSubVectors + quad * 4 / kSubVector] * kFp8Unit;
            for (int half = 0; half < 2; ++half) {
                const i64 at = angles + quad * 4 + half * 2;
                const float *cos = layer.cos + at, *sin = layer.sin + at;
                rotation.cosine[row][j][half] =
                    layer.cos ? pack_f16(cos[0] * scale, cos[1] * scale) : pack_f16(scale, scale);
                rotation.sine[row][j][half] =
                    layer.cos ? pack_f16(sign * scale * sin[0], sign * scale * sin[1]) : pack_f16(0, 0);
            }
        }
    }
    return rotation;
}

ANTKV_DEVICE const u16* query_row(const Split& split, int q) {
    return split.query.at(split.hand, split.head * kGroup + (q < kGroup ? q : kGroup - 1));
}

// The query, scaled for base-2 exponentials and turned back by position `base`.
ANTKV_DEVICE void turn_back(const Split& split, int base, uint2 (*to)[kQuads]) {
    const Layer& layer = split.layer;
    const float scale = layer.scale * kLog2E / layer.rotary_magnitude;
    constexpr int kItems = kGroup * kHeadSize / 4;  // two channels and their partners
    for (int item = (int)threadIdx.x; item < kItems; item += kThreads) {
        const int q = item / (kHeadSize / 4), channel = item % (kHeadSize / 4) * 2;
        const u16* from = query_row(split, q) + channel;
        float low[2], high[2];
        for (int i = 0; i < 2; ++i) {
            const float a = to_float(from[i]) * scale, b = to_float(from[i + kHeadSize / 2]) * scale;
            const i64 at = (i64)base * (kHeadSize / 2) + channel + i;
            const float cos = layer.cos ? layer.cos[at] : 1, sin = layer.cos ? layer.sin[at] : 0;
            low[i] = a * cos + b * sin;
            high[i] = b * cos - a * sin;
        }
        u32* row = (u32*)to[q];
        row[channel / 2] = pack_f16(low[0], low[1]);
        row[channel / 2 + kHeadSize / 4] = pack_f16(high[0], high[1]);
    }
}
