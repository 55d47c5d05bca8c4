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
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The query of the lane's column `i`.
            const int own = group * kValueColumns + (lane.column * 2 + i) / Tables::kSetColumns;
            float factor = 1;
#pragma unroll
            for (int q = group * kValueColumns; q < (group + 1) * kValueColumns && q < kGroup; ++q)
                if (q == own) factor = factors[q];
            for (int set = 0; set < kOwnSets; ++set)
                for (int half = 0; half < 2; ++half)
                    for (int row = 0; row < 2; ++row) sums.output[set][group][half][row * 2 + i] *= factor;
        }
    }
}

// A lane of mma's B has tokens c, c + 4, c + 8 and c + 12 of a tile: their weights lie side by side.
ANTKV_DEVICE int weight_place(int token) { return token / 16 * 16 + token % 4 * 4 + token / 4 % 4; }

// exact: the token's row takes the place of its code; `any_exact` for the warp.
ANTKV_DEVICE void write_weights(const Split& split, bool visible, bool exact, bool any_exact, Sums& sums) {
    const Lane lane = split.lane;
    float logits[kGroup];
    bool above = false;
    for (int q = 0; q < kGroup; ++q) {
        logits[q] = visible ? split.shared.logits[split.warp][q][lane.index] : -ANTKV_INFINITY;
        above |= logits[q] > sums.maximum[q] + kSlack;
    }
    if (ballot_warp(above)) raise_maxima(logits, lane, sums);
    const int at = weight_place(lane.index);
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
    const bool counts = lane.row % Tables::kSetColumns == set % Tables::kSetColumns;
    const int own = kOwnSets == 1 ? 0 : set;
    for (int group = 0; group < kValueGroups; ++group) {
        const u32 b0 = counts ? weights[group].x : 0, b1 = counts ? weights[group].y : 0;
        for (int half = 0; half < 2; ++half) multiply<kBrain>(sums.output[own][group][half], a[half], b0, b1);
    }
}

ANTKV_DEVICE void load_weights(const Split& split, int kind, int tile, uint2 (&weights)[kValueGroups]) {
    for (int group = 0; group < kValueGroups; ++group) {
        const int q = group * kValueColumns + split.lane.row / Tables::kSetColumns;
        const u16* row = split.shared.weights[split.warp][kind][q < kGroup ? q : kGroup - 1];
        weights[group] = *(const uint2*)(row + tile * 16 + split.lane.column * 4);
    }
}

ANTKV_DEVICE void coded_values(const Split& split, int buffer, int tile, Sums& sums) {
    const Lane lane = split.lane;
    const u8* codes = ((const Staging*)split.shared.staging)->codes[split.warp][buffer][1];
    uint2 weights[kValueGroups];
    load_weights(split, 0, tile, weights);
    Tables::ValueCodes words[4];
    for (int i = 0; i < 4; ++i)
        words[i] = split.tables.value_codes(codes + (tile * 16 + lane.column + 4 * i) * kCodeBytes);
#pragma unroll
    for (int turn = 0; turn < kSets; turn += Tables::kValuesAtOnce) {
        Tables::ValueLoad loads[4];
        for (int i = 0; i < 4; ++i) loads[i] = split.tables.load_values(words[i], turn);
        for (int j = 0; j < Tables::kValuesAtOnce; ++j) {
            const Quad tokens[4] = {loads[0].quads[j], loads[1].quads[j], loads[2].quads[j], loads[3].quads[j]};
            add_values<false>(tokens, weights, Tables::value_set(lane.column, turn + j), lane, sums);
        }
    }
}

ANTKV_DEVICE void kept_values(const Split& split, const u8* own_row, int tile, Sums& sums) {
    const Lane lane = split.lane;
    uint2 weights[kValueGroups];
    load_weights(split, 1, tile, weights);
    const u8* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = (const u8*)from_lane((i64)own_row, tile * 16 + lane.column + 4 * i);
#pragma unroll
    for (int set = 0; set < kSets; set += 2) {
        Quad first[4], second[4];
        for (int i = 0; i < 4; ++i) {
            const uint4 words = load16(rows[i], Tables::value_quad(lane.row, set) * 8);
            first[i] = {words.x, words.y};
            second[i] = {words.z, words.w};
        }
        add_values<kBFloat16>(first, weights, set, lane, sums);
        add_values<kBFloat16>(second, weights, set + 1, lane, sums);
    }
}

// What anchors add to the sums, as lanes have them.
ANTKV_DEVICE void correct_values(const Split& split, const Anchors<ValuePart>& anchors, u32 exact, Sums& sums) {
    const Lane lane = split.lane;
    for_anchors(split, anchors, exact, [&](int token, ValuePart part) {
        float channels[ValuePart::kChunks][2][4];
#pragma unroll
        for (int chunk = 0; chunk < ValuePart::kChunks; ++chunk) {
            const float4 first = widen_correction(part.quads[chunk].x), second = widen_correction(part.quads[chunk].y);
            const float both[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
            for (int i = 0; i < 8; ++i) channels[chunk][i / 4][i % 4] = both[i / 4][i % 4];
        }
#pragma unroll
        for (int group = 0; group < kValueGroups; ++group) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int q = group * kValueColumns + (lane.column * 2 + i) / Tables::kSetColumns;
                const u16* weights = split.shared.weights[split.warp][0][q < kGroup ? q : kGroup - 1];
                const float weight = f16_to_float(weights[weight_place(token)]) * kFp8Unit;
#pragma unroll
                for (int own = 0; own < kOwnSets; ++own) {
                    // With sets side by side, a column is of one of the two sets; else a lane has all sets.
                    const float(&quad)[4] = kOwnSets == 1 ? channels[0][i] : channels[own / 2][own % 2];
#pragma unroll
                    for (int k = 0; k < 4; ++k) sums.output[own][group][k / 2][k % 2 * 2 + i] += weight * quad[k];
                }
            }
        }
    });
}
