// What decoding a split has in shared memory and in registers, and what a lane knows before it reads any code.
#pragma once

#include "tables.cuh"

constexpr int kTiles = 2;                    // of 16 tokens, per warp: halves the reads of the query
constexpr int kTokens = 16 * kTiles;         // a warp's: one per lane
constexpr int kSpan = kWarps * kTokens;      // tokens of all warps together
constexpr int kRowsPerLane = 2 * kTiles;     // K rows of a lane: 8 apart
constexpr int kKeyColumns = 8 / Tables::kOrders;        // queries in the 8 columns of mma's B, for K
constexpr int kKeyGroups = (kGroup + kKeyColumns - 1) / kKeyColumns;
constexpr int kValueColumns = 8 / Tables::kSetColumns;  // and for V
constexpr int kValueGroups = (kGroup + kValueColumns - 1) / kValueColumns;
constexpr int kOwnSets = kSets / Tables::kSetColumns;   // sets that are added up apart
constexpr int kExactGroups = (kGroup + 7) / 8;
constexpr float kLog2E = 1.4426950408889634f;
// The maximum that weights are relative to moves when a logit passes it by this much: 2^8 fits float16, and it is rare.
constexpr float kSlack = 8.0f;

struct Staging {
    u8 codes[kWarps][2][2][kTokens * kCodeBytes];  // [warp][buffer][K, V]
};
struct Merging {
    float output[kWarps][kValueColumns][kHeadSize];
};

// Shared memory behind the tables.
struct Shared {
    uint2 query[2][kGroup][kQuads];        // turned back, float16; one buffer per span
    float logits[kWarps][kGroup][kTokens];
    u16 weights[kWarps][2][kGroup][kTokens];  // [coded, kept], tokens in the order of mma's B
    float statistics[kWarps][kGroup][2];   // maximum and sum of each warp
    alignas(16) u8 staging[larger(sizeof(Staging), sizeof(Merging))];
};

static_assert(Tables::kBytes + sizeof(Shared) == ANTKV_DECODE_SHARED, "vllm_antkv/ops/cuda_build.py counts otherwise");

struct Rotation {
    u32 cosine[kRowsPerLane][kPairs][2], sine[kRowsPerLane][kPairs][2];  // float16 pairs of channels
};

// What a warp has added up.
struct Sums {
    float output[kOwnSets][kValueGroups][2][4];
    float maximum[kGroup], total[kGroup];  // `total` is of the lane's own tokens
};

// What is kept of a lane's token beside its codes: rows in full precision, which take their place, or corrections (e4m3),
// which are added to them. Null where the query sees the code alone.
struct KeptRows {
    const u8 *key, *value;
    bool corrects_key, corrects_value;
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
    const Tables& tables;
    const Rows query, key, value;
    const int head, request, begin, end, position, hand;  // `position` of the query, row `hand` of the step's tensors
    const Lane lane;
    const int warp;
};

// Cosines and sines of the offsets of the lane's rows. The scales of the tables, which the channels of a rotary pair
// share, ride on them.
ANTKV_DEVICE Rotation lane_rotation(const Layer& layer, int head, Lane lane, int warp) {
    Rotation rotation;
#pragma unroll
    for (int row = 0; row < kRowsPerLane; ++row) {
        const int offset = warp * kTokens + row * 8 + lane.row;
        const i64 angles = (i64)(offset < layer.rotary_rows ? offset : 0) * (kHeadSize / 2);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int first = Tables::key_quad(lane.column, lane.row % Tables::kOrders, j, false);
            const int quad = first % (kQuads / 2);
            const float scale = Tables::key_scale(layer, head, quad), sign = first == quad ? 1 : -1;
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

// The query, scaled for base-2 exponentials, turned back by position `base`, its channels where decoded rows have them.
ANTKV_DEVICE void turn_back(const Split& split, int base, uint2 (*to)[kQuads]) {
    const Layer& layer = split.layer;
    const float scale = layer.scale * kLog2E / layer.rotary_magnitude;
    constexpr int kItems = kGroup * kHeadSize / 4;  // two channels and their partners
    for (int item = (int)threadIdx.x; item < kItems; item += kThreads) {
        const int q = item / (kHeadSize / 4), channel = item % (kHeadSize / 4) * 2;
        const u16* from = query_row(split, q);
        float low[2], high[2];
        for (int i = 0; i < 2; ++i) {
            const float a = to_float(from[channel_at(layer, channel + i)]) * scale;
            const float b = to_float(from[channel_at(layer, channel + i + kHeadSize / 2)]) * scale;
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
