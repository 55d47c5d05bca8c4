// Weights of a warp's 32 tokens, and the sums of their V rows.
#pragma once

#include "rows.cuh"

// Move the maxima up to the logits of this tile.
ANTKV_DEVICE void raise_maxima(const float (&logits)[kGroup], Lane lane, Sums& sums) {
    float factors[kGroup];
    for (int q = 0; q < kGroup; ++q) {
        const float maximum = fmaxf(sums.maximum[q], largest_of_warp(logits[q]));
        factors[q] = exp2_fast(sums.maximum[q] - maximum);
        sums.maximum[q] = maximum;
        sums.total[q] *= factors[q];
    }
#pragma unroll
    for (int group = 0; group < kValueGroups; ++group) {
        // Both columns of a lane belong to one query.
        float factor = 1;
#pragma unroll
        for (int i = 0; i < kValueColumns; ++i)
            if (i == lane.column * 2 / kSets && group * kValueColumns + i < kGroup)
                factor = factors[group * kValueColumns + i < kGroup ? group * kValueColumns + i : 0];
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 4; ++i) sums.output[group][half][i] *= factor;
    }
}

ANTKV_DEVICE void write_weights(const Split& split, bool visible, bool exact, bool any_exact, Sums& sums) {
    const Lane lane = split.lane;
    float logits[kGroup];
    bool above = false;
    for (int q = 0; q < kGroup; ++q) {
        logits[q] = visible ? split.shared.logits[split.warp][q][lane.index] : -ANTKV_INFINITY;
        above |= logits[q] > sums.maximum[q] + kSlack;
    }
    if (ballot_warp(above)) raise_maxima(logits, lane, sums);
    // A lane of mma's B has tokens c, c + 4, c + 8 and c + 12 of a tile: they lie side by side.
    const int at = lane.index / 16 * 16 + lane.index % 4 * 4 + lane.index / 4 % 4;
    for (int q = 0; q < kGroup; ++q) {
        const float weight = exp2_fast(logits[q] - sums.maximum[q]);
        sums.total[q] += weight;
        split.shared.weights[split.warp][0][q][at] = (u16)pack_f16(exact ? 0 : weight, 0);
        if (any_exact) split.shared.weights[split.warp][1][q][at] = (u16)pack(exact ? weight : 0, 0);
    }
}

// Adds the values of a set of channels of 16 tokens. `tokens` are c, c + 4, c + 8, c + 12 of the lane; `set` is the one
// that its columns of A hold.
template <bool kBrain>
ANTKV_DEVICE void add_values(const Quad (&tokens)[4], const uint2 (&weights)[kValueGroups], int set, Lane lane,
                             Sums& sums) {
    u32 a[2][4];
    for (int half = 0; half < 2; ++half) {
        for (int pair = 0; pair < 2; ++pair) {
            const u32 first = half ? tokens[2 * pair].high : tokens[2 * pair].low;
            const u32 second = half ? tokens[2 * pair + 1].high : tokens[2 * pair + 1].low;
            a[half][2 * pair] = permute_bytes(first, second, 0x5410);
            a[half][2 * pair + 1] = permute_bytes(first, second, 0x7632);
        }
    }
    // Columns of B are (query, set): a lane's weights count where its column is of the set that its tokens have in A.
    const bool counts = lane.row % kSets == set;
    for (int group = 0; group < kValueGroups; ++group) {
        const u32 b0 = counts ? weights[group].x : 0, b1 = counts ? weights[group].y : 0;
        for (int half = 0; half < 2; ++half) multiply<kBrain>(sums.output[group][half], a[half], b0, b1);
    }
}

ANTKV_DEVICE void load_weights(const Split& split, int kind, int tile, uint2 (&weights)[kValueGroups]) {
    for (int group = 0; group < kValueGroups; ++group) {
        const int q = group * kValueColumns + split.lane.row / kSets;
        const u16* row = split.shared.weights[split.warp][kind][q < kGroup ? q : kGroup - 1];
        weights[group] = *(const uint2*)(row + tile * 16 + split.lane.column * 4);
    }
}

ANTKV_DEVICE void coded_values(const Split& split, const Columns& columns, int buffer, int tile, Sums& sums) {
    const Lane lane = split.lane;
    const u8* codes = ((const Staging*)split.shared.staging)->codes[split.warp][buffer][1];
    const u8* tables = split.tables + kValueColumn / kTableBytes * kTableBytes;
    uint2 weights[kValueGroups];
    load_weights(split, 0, tile, weights);
    u32 words[4];
    for (int i = 0; i < 4; ++i)
        words[i] =
            load_codes<kValueCodes>(codes + (tile * 16 + lane.column + 4 * i) * kCodeBytes + columns.value_codes);
#pragma unroll
    for (int turn = 0; turn < kSets; ++turn) {
        Quad tokens[4];
        for (int i = 0; i < 4; ++i) {
            tokens[i] = load_quad(tables, words[i], columns.value[turn], columns.value_selector[turn]);
            if constexpr (kFp8) {
                tokens[i].low = mul_f16x2(tokens[i].low, columns.value_scale[turn]);
                tokens[i].high = mul_f16x2(tokens[i].high, columns.value_scale[turn]);
            }
        }
        add_values<false>(tokens, weights, value_set(lane.column, turn), lane, sums);
    }
}

ANTKV_DEVICE void exact_values(const Split& split, const u8* own_row, int tile, Sums& sums) {
    const Lane lane = split.lane;
    uint2 weights[kValueGroups];
    load_weights(split, 1, tile, weights);
    const u8* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = (const u8*)from_lane((i64)own_row, tile * 16 + lane.column + 4 * i);
#pragma unroll
    for (int set = 0; set < kSets; set += 2) {
        Quad first[4], second[4];
        for (int i = 0; i < 4; ++i) {
            const uint4 words = load16(rows[i], value_quad(lane.row, set) * 8);
            first[i] = {words.x, words.y};
            second[i] = {words.z, words.w};
        }
        add_values<kBFloat16>(first, weights, set, lane, sums);
        add_values<kBFloat16>(second, weights, set + 1, lane, sums);
    }
}
