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
    alignas(16) float raw[kGroup][kHeadSize];  // the query as it is, for corrections of K
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

// The rows in full precision that take the place of the codes of a lane's token; null where the query sees the code.
struct KeptRows {
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

// The query, scaled for base-2 exponentials and turned back by the first position of a span: what a thread has of it,
// and what turns it on by a span.
constexpr int kTurned = (kGroup * kHeadSize / 2 + kThreads - 1) / kThreads;  // rotary pairs of a thread
static_assert(kThreads % (kHeadSize / 2) == 0, "all pairs of a thread turn by the same angle");
struct Turning {
    float first[kTurned], second[kTurned], cosine, sine;
};

ANTKV_DEVICE Turning start_turning(const Split& split) {
    const Layer& layer = split.layer;
    const float scale = layer.scale * kLog2E / layer.rotary_magnitude;
    const int channel = (int)threadIdx.x % (kHeadSize / 2);
    Turning turning = {{}, {}, 1, 0};
    float cos = 1, sin = 0;
    if (layer.cos) {
        const i64 at = (i64)split.begin * (kHeadSize / 2) + channel, step = (i64)kSpan * (kHeadSize / 2) + channel;
        cos = layer.cos[at], sin = layer.sin[at];
        // Shorter tables have a single span.
        if (layer.rotary_rows > kSpan)
            turning.cosine = layer.cos[step] / layer.rotary_magnitude,
            turning.sine = layer.sin[step] / layer.rotary_magnitude;
    }
    const int first = channel_at(layer, channel), second = channel_at(layer, channel + kHeadSize / 2);
    for (int i = 0; i < kTurned; ++i) {
        const int q = ((int)threadIdx.x + i * kThreads) / (kHeadSize / 2);
        const u16* from = query_row(split, q);
        const float a = to_float(from[first]) * scale, b = to_float(from[second]) * scale;
        turning.first[i] = a * cos + b * sin;
        turning.second[i] = b * cos - a * sin;
    }
    return turning;
}

ANTKV_DEVICE void turn_on(Turning& turning) {
    for (int i = 0; i < kTurned; ++i) {
        const float a = turning.first[i], b = turning.second[i];
        turning.first[i] = a * turning.cosine + b * turning.sine;
        turning.second[i] = b * turning.cosine - a * turning.sine;
    }
}

ANTKV_DEVICE void write_query(const Turning& turning, uint2 (*to)[kQuads]) {
    const int channel = (int)threadIdx.x % (kHeadSize / 2);
    for (int i = 0; i < kTurned; ++i) {
        const int q = ((int)threadIdx.x + i * kThreads) / (kHeadSize / 2);
        if (q >= kGroup) continue;
        u16* row = (u16*)to[q];
        row[channel] = (u16)pack_f16(turning.first[i], 0);
        row[channel + kHeadSize / 2] = (u16)pack_f16(turning.second[i], 0);
    }
}

// The query as it is, scaled for corrections that were widened to 1/256 of their value.
ANTKV_DEVICE void write_raw_query(const Split& split) {
    const float scale = split.layer.scale * kLog2E * kFp8Unit;
    for (int item = (int)threadIdx.x; item < kGroup * kHeadSize; item += kThreads)
        split.shared.raw[item / kHeadSize][item % kHeadSize] =
            to_float(query_row(split, item / kHeadSize)[item % kHeadSize]) * scale;
}
