// Weights of a warp's 32 tokens, and the sums of their V rows.
#pragma once

#include "rows.cuh"

// Move the maxima up to the logits of this tile.
ANTKV_DEVICE void raise_maxima(const Logits& logits, Lane lane, Sums& sums) {
    float own[kOwnQueries], factors[kGroup];
    for (int i = 0; i < kOwnQueries; ++i) {
        const float(&x)[4] = logits.of[i];
        own[i] = fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]));
    }
    for (int step = 0; step < 3; ++step)
        for (int i = 0; i < kOwnQueries; ++i) own[i] = fmaxf(own[i], from_lane_xor(own[i], peer(step)));
    for (int i = 0; i < kOwnQueries; ++i) {
        const float maximum = fmaxf(sums.maximum[i], own[i]);
        own[i] = exp2_fast(sums.maximum[i] - maximum);
        sums.maximum[i] = maximum;
        sums.total[i] *= own[i];
    }
    for (int q = 0; q < kGroup; ++q) factors[q] = from_lane(own[own_of(q)], owner_of(q));
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

// exact: tokens whose rows take the place of their codes.
ANTKV_DEVICE void write_weights(const Tile& tile, u32 exact, Logits& logits, Sums& sums) {
    const Lane lane = tile.lane;
    const int left = tile.end - tile.token - lane.row;  // tokens up to the end, from the lane's first on
    if (tile.end - tile.token < kTokens) {
        for (int k = 0; k < 4; ++k)
            for (int i = 0; i < kOwnQueries; ++i)
                if (8 * k >= left) logits.of[i][k] = -ANTKV_INFINITY;
    }
    bool above = false;
    for (int i = 0; i < kOwnQueries; ++i)
        for (int k = 0; k < 4; ++k) above |= logits.of[i][k] > sums.maximum[i] + kSlack;
    if (ballot_warp(above)) raise_maxima(logits, lane, sums);
    for (int i = 0; i < kOwnQueries; ++i) {
        float weights[4];
        for (int k = 0; k < 4; ++k) {
            weights[k] = exp2_fast(logits.of[i][k] - sums.maximum[i]);
            sums.total[i] += weights[k];
        }
        const int q = own_query(lane, i), place = place_of(q, lane.row);
        if (q >= kGroup) continue;
        if (exact) {
            float rows[4];
            for (int k = 0; k < 4; ++k) {
                const bool is_exact = exact >> (lane.row + 8 * k) & 1;
                rows[k] = is_exact ? weights[k] * tile.tables.value_unit : 0;
                if (is_exact) weights[k] = 0;
            }
            *(uint2*)&tile.weights(1)[q][place] = {pack(rows[0], rows[1]), pack(rows[2], rows[3])};
        }
        *(uint2*)&tile.weights(0)[q][place] = {pack_f16(weights[0], weights[1]), pack_f16(weights[2], weights[3])};
    }
}

// V's halves of a tile: `half` * 4 to `half` * 4 + 3 of each 8 tokens, of which a lane has one each.
ANTKV_DEVICE int value_token(int half, Lane lane, int i) { return half * 4 + lane.column + i * 8; }
ANTKV_DEVICE u32 value_tokens(int half) { return 0x0f0f0f0fu << half * 4; }

// Adds the values of a set of channels of 16 tokens: A is those of the lane's four tokens, of the set that its columns hold.
template <bool kBrain>
ANTKV_DEVICE void add_values(const u32 (&a)[2][4], const uint2 (&weights)[kValueGroups], int set, Lane lane, Sums& sums) {
    // Columns of B are (query, part): a lane's weights count where its column is of the part that its tokens have in A.
    const bool counts = lane.row % Tables::kSetColumns == set / kOwnSets;
    const int own = set % kOwnSets;
    for (int group = 0; group < kValueGroups; ++group) {
        const u32 b0 = counts ? weights[group].x : 0, b1 = counts ? weights[group].y : 0;
        for (int half = 0; half < 2; ++half) multiply<kBrain>(sums.output[own][group][half], a[half], b0, b1);
    }
}

// kind: 0 for tokens that are seen as codes, 1 for exact ones. half: of the tile.
ANTKV_DEVICE void load_weights(const Tile& tile, int kind, int half, uint2 (&weights)[kValueGroups]) {
    for (int group = 0; group < kValueGroups; ++group) {
        const int q = group * kValueColumns + tile.lane.row / Tables::kSetColumns;
        const u16* row = tile.weights(kind)[q < kGroup ? q : kGroup - 1];
        weights[group] = *(const uint2*)(row + place_of(q, value_token(half, tile.lane, 0)));
    }
}

// Of a half of the tile: what the tables fetch ahead for the lane's four tokens.
struct Values {
    Tables::ValueRow tokens[4];
};
ANTKV_DEVICE Values fetch_values(const Tile& tile, int half) {
    const u8* codes = tile.codes() + kCodeSection;
    Values values;
    for (int i = 0; i < 4; ++i)
        values.tokens[i] = tile.tables.fetch_value(codes + value_token(half, tile.lane, i) * kCodeBytes);
    return values;
}

ANTKV_DEVICE void coded_values(const Tile& tile, int half, const Values& values, Sums& sums) {
    const Lane lane = tile.lane;
    uint2 weights[kValueGroups];
    load_weights(tile, 0, half, weights);
#pragma unroll
    for (int turn = 0; turn < kSets; turn += Tables::kValuesAtOnce) {
        Tables::ValueLoad loads[4];
        for (int i = 0; i < 4; ++i) loads[i] = tile.tables.load_values(values.tokens[i], turn);
        for (int j = 0; j < Tables::kValuesAtOnce; ++j) {
            u32 a[2][4];
            Tables::value_operand(loads, j, a);
            add_values<false>(a, weights, Tables::value_set(lane.column, turn + j), lane, sums);
        }
    }
}

// own_row: of the lane's token, or null.
ANTKV_DEVICE void exact_values(const Tile& tile, const u8* own_row, int half, Sums& sums) {
    const Lane lane(opaque((u32)tile.lane.index));
    uint2 weights[kValueGroups];
    load_weights(tile, 1, half, weights);
    const u8* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = (const u8*)from_lane((i64)own_row, value_token(half, lane, i));
#pragma unroll
    for (int set = 0; set < kSets; set += 2) {
        Quad first[4], second[4];
        for (int i = 0; i < 4; ++i) {
            const uint4 words = load16(rows[i], Tables::value_quad(lane.row, set) * 8);
            first[i] = {words.x, words.y};
            second[i] = {words.z, words.w};
        }
        u32 a[2][2][4];
        transpose(first, a[0]);
        transpose(second, a[1]);
        for (int i = 0; i < 2; ++i) add_values<kBFloat16>(a[i], weights, set + i, lane, sums);
    }
}

// Four channels of a correction, `kFp8Unit` times less.
ANTKV_DEVICE void widen_correction(u32 word, float (&channels)[4]) {
    const Quad quad = widen_e4m3(word);
    channels[0] = f16_to_float((u16)quad.low), channels[1] = f16_to_float((u16)(quad.low >> 16));
    channels[2] = f16_to_float((u16)quad.high), channels[3] = f16_to_float((u16)(quad.high >> 16));
}

// What an anchor adds to the sums of the channels that a lane has. Both columns of a lane are of the same query.
ANTKV_DEVICE void correct_values(const Tile& tile, const u8* row, int token, Sums& sums) {
    const Lane lane(opaque((u32)tile.lane.index));
    float weights[kValueGroups];
    for (int group = 0; group < kValueGroups; ++group) {
        const int q = group * kValueColumns + lane.column * 2 / Tables::kSetColumns;
        const u16 weight = tile.weights(0)[q < kGroup ? q : kGroup - 1][place_of(q, token)];
        weights[group] = f16_to_float(weight) * (kFp8Unit * tile.tables.value_unit);
    }
    // Two neighbouring quads at a time: a set of each column, or both sets of one.
    static_assert(kOwnSets <= 2 && Tables::kSetColumns % 2 == 0, "lanes have four quads at most");
#pragma unroll
    for (int step = 0; step < kOwnSets; ++step) {
        const int part = (lane.column * 2 + step) % Tables::kSetColumns;
        const uint2 words = *(const uint2*)(row + Tables::value_quad(lane.row, part * kOwnSets) * 4);
        float quads[2][4];
        widen_correction(words.x, quads[0]);
        widen_correction(words.y, quads[1]);
        for (int group = 0; group < kValueGroups; ++group)
            for (int i = 0; i < 2; ++i)
                for (int k = 0; k < 4; ++k) {
                    const int own = kOwnSets == 1 ? 0 : i, column = kOwnSets == 1 ? i : step;
                    sums.output[own][group][k / 2][k % 2 * 2 + column] += weights[group] * quads[i][k];
                }
    }
}
