// Nearest centroids of rows, on tensor cores and yet as exact as in float32.
//
// |x - c|^2 / 2 is |c|^2 / 2 - x.c but for a constant. Centroids are float16. A row is the sum of an upper and a lower
// float16 per channel, 22 bits together, since a rounded row would choose other codes; products add up in float32.
// Rows are the left operand of mma.m16n8k16, centroids the right one, and the accumulators start from |c|^2 / 2. Along
// the depth the left operand has the upper parts of a sub-vector's channels, then the lower parts, then zeros. A quad has
// four channels of a part; where there are but 2, both parts of them.
#pragma once

#include "lanes.cuh"

constexpr int kMaxTiles = 4;                              // of 16 rows, whose centroids are read once
constexpr int kSubQuads = larger(kSubVector / 4, 1);
constexpr bool kHalfQuads = kSubVector == 2;
constexpr int kSteps = larger(2 * kSubVector / 16, 1);    // mma per tile and 8 centroids
constexpr int kCentroidQuads = larger(kSubQuads / 4, 1);  // that a lane reads of a centroid
constexpr int kTurn = kSubVector == 32 ? 4 : 8;           // times 8 centroids, read a turn ahead: 48 registers at most

// `part` 0 of two negated numbers in float16, or what it leaves (1), or nothing.
ANTKV_DEVICE u32 negated_part(float a, float b, int part) {
    const u32 upper = pack_f16(-a, -b);
    if (part == 0) return upper;
    return part == 1 ? pack_f16(-a - f16_to_float((u16)upper), -b - f16_to_float((u16)(upper >> 16))) : 0;
}

// The left operand: rows 8 apart of a tile, at one sub-vector.
struct RowTile {
    u32 steps[kSteps][4];

    ANTKV_DEVICE void load(const float* upper, const float* lower, Lane lane) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const int quad = step * 4 + lane.column, part = quad / kSubQuads, channel = quad % kSubQuads * 4;
            for (int i = 0; i < 2; ++i) {
                const float *row = (i ? lower : upper) + channel, *others = kHalfQuads ? row : row + 2;
                steps[step][i] = negated_part(row[0], row[1], kHalfQuads ? 2 * part : part);
                steps[step][2 + i] = negated_part(others[0], others[1], kHalfQuads ? 2 * part + 1 : part);
            }
        }
    }
};

// The right operands of a turn, and what their accumulators start from.
struct CentroidTurn {
    uint2 quads[kTurn][kCentroidQuads];
    float2 half_norms[kTurn];

    ANTKV_DEVICE void load(const u16* centroids, const float* norms, int first, Lane lane) {
#pragma unroll
        for (int j = 0; j < kTurn; ++j) {
            const u16* centroid = centroids + (first + j * 8 + lane.row) * kSubVector;
            if constexpr (kHalfQuads) {
                const u32 channels = load_constant((const u32*)centroid);
                quads[j][0] = {channels, channels};
            } else {
                for (int i = 0; i < kCentroidQuads; ++i)
                    quads[j][i] = load_constant((const uint2*)(centroid + (i * 4 + lane.column) % kSubQuads * 4));
            }
            half_norms[j] = load_constant((const float2*)(norms + first + j * 8 + lane.column * 2));
        }
    }
};

// The best of the centroids that a lane has seen, of two rows per tile.
struct Nearest {
    float score[kMaxTiles][2];
    int code[kMaxTiles][2];
};

// Search centroids `begin .. end` of a sub-vector for `num_tiles` tiles of rows whose sub-vectors start `stride` apart.
// All lanes of a row find the same; equal distances take the lower index.
ANTKV_DEVICE Nearest find_nearest(const float* rows, int stride, int num_tiles, const u16* centroids,
                                  const float* half_norms, int begin, int end, Lane lane) {
    RowTile tiles[kMaxTiles];
    Nearest nearest;
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
        for (int i = 0; i < 2; ++i) nearest.score[t][i] = ANTKV_INFINITY, nearest.code[t][i] = begin;
        const float* row = rows + (t * 16 + lane.row) * stride;
        if (t < num_tiles) tiles[t].load(row, row + 8 * stride, lane);
    }
    CentroidTurn turn;
    turn.load(centroids, half_norms, begin, lane);
    for (int first = begin; first < end; first += kTurn * 8) {
        CentroidTurn next = turn;
        if (first + kTurn * 8 < end) next.load(centroids, half_norms, first + kTurn * 8, lane);
#pragma unroll
        for (int j = 0; j < kTurn; ++j) {
            const float2 start = turn.half_norms[j];
#pragma unroll
            for (int t = 0; t < kMaxTiles; ++t) {
                if (t >= num_tiles) break;
                float scores[4] = {start.x, start.y, start.x, start.y};
                for (int step = 0; step < kSteps; ++step) {
                    const uint2 b = turn.quads[j][step % kCentroidQuads];
                    mma_f16(scores, tiles[t].steps[step], b.x, b.y);
                }
                for (int i = 0; i < 4; ++i) {
                    if (!(scores[i] < nearest.score[t][i / 2])) continue;
                    nearest.score[t][i / 2] = scores[i];
                    nearest.code[t][i / 2] = first + j * 8 + lane.column * 2 + i % 2;
                }
            }
        }
        turn = next;
    }
#pragma unroll
    for (int t = 0; t < kMaxTiles; ++t) {
        for (int i = 0; i < 2; ++i) {
            float& score = nearest.score[t][i];
            int& code = nearest.code[t][i];
            for (int mask = 1; mask < 4; mask *= 2) {
                const float other = from_lane_xor(score, mask);
                const int other_code = from_lane_xor(code, mask);
                if (other < score || (other == score && other_code < code)) score = other, code = other_code;
            }
        }
    }
    return nearest;
}
