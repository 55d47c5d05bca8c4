// 4,096 centroids: tables in the L2 cache, in e4m3.
//
// At head size 128 the centroids of a KV head are 512 KB for K and 512 KB for V: more than shared memory, less than L2.
// So a CTA stages nothing. A lane brings all that it needs of a sub-vector at once: 16 channels, as many bytes, with one
// address. Centroids of 32 channels are whole sectors of 32 bytes, which two lanes read together.
//
// Codebooks of so many centroids are rounded to e4m3 before anybody encodes or decodes with them
// (vllm_antkv/ops/fp8_tables.py), so nothing is lost here.
#pragma once

#include "lanes.cuh"

// See `Tables`.
struct CachedTables {
    static constexpr int kKeysAtOnce = kPairs, kValuesAtOnce = kSets;
    // All the same. Where queries are few, mma has two columns for each, of which lanes take one.
    static constexpr int kOrders = kGroup <= 4 ? 2 : 1;
    // Fewer queries at a time, and half the registers of sums.
    static constexpr int kSetColumns = 2;
    static constexpr int kTableBytes = kCentroids * kHeadSize;  // of K or V of a head
    static constexpr int kSubVectorBytes = kCentroids * kSubVector;
    static constexpr int kBytes = 0;
    // The second half of a lane's channels of K is of a sub-vector that lies so far behind the first.
    static constexpr bool kPartnersAreBehind = kSubVectors % 4 == 0;
    static constexpr int kBehind = kTableBytes / 2;

    // Where a lane finds a sub-vector's code in a row of codes, which lie two in three bytes, and its channels in the
    // table: `factor` bytes per unit of what `mask` leaves.
    struct Place {
        const u8* table;
        u32 code, mask, factor;
    };
    Place key[2], value;
    const float value_unit;

    ANTKV_DEVICE CachedTables(const Layer& layer, int head, Lane lane, u8*)
        : value_unit(1 / value_scale(layer, head)) {
        const u8* tables = layer.tables + (i64)head * 2 * kTableBytes;
        for (int second = 0; second < 2; ++second) {
            const int quad = key_quad(lane.column, 0, 0, second);
            key[second] = place(tables + quad * 4 / kSubVector * kSubVectorBytes, quad);
        }
        const int quad = value_quad(lane.row, 0);
        value = place(tables + kTableBytes + quad * 4 / kSubVector * kSubVectorBytes, quad);
    }

    ANTKV_DEVICE static int key_quad(int column, int, int j, bool second) {
        return kPairs * column + j + (second ? kQuads / 2 : 0);
    }
    ANTKV_DEVICE static int query_offset(Lane lane, int j, bool second, bool) {
        return key_quad(lane.column, 0, j, second) * 8;
    }
    ANTKV_DEVICE static int value_set(int, int turn) { return turn; }
    ANTKV_DEVICE static int value_quad(int row, int set) { return kSets * row + set; }

    ANTKV_DEVICE static float key_scale(const Layer& layer, int head, int) {
        return layer.k_scales[head * kSubVectors] * kFp8Unit;
    }
    ANTKV_DEVICE static float value_scale(const Layer& layer, int head) {
        return layer.v_scales[head * kSubVectors] * kFp8Unit;
    }

    struct Load {
        u32 quads[kPairs];
    };
    static_assert(kPairs == kSets, "lanes have as many channels of V as of each half of K");
    using KeyLoad = Load;
    using ValueLoad = Load;
    // L2 is far: what a row stands for is fetched, long before it is needed.
    struct KeyRow {
        Load halves[2];
    };
    using ValueRow = Load;
    ANTKV_DEVICE KeyRow fetch_key(const u8* row) const {
        if constexpr (!kPartnersAreBehind) return {{load(key[0], row, 0), load(key[1], row, 0)}};
        // The partner's code begins at the same bit of a byte: one place does for both.
        return {{load(key[0], row, 0), load(key[0], row + kCodeBytes / 2, kBehind)}};
    }
    ANTKV_DEVICE ValueRow fetch_value(const u8* row) const { return load(value, row, 0); }
    ANTKV_DEVICE static Load load_keys(const KeyRow& row, int, bool second) { return row.halves[second]; }
    ANTKV_DEVICE static Load load_values(const ValueRow& row, int) { return row; }

    ANTKV_DEVICE static Quad key_operand(const Load& load, int i) { return widen_e4m3(load.quads[i]); }
    // Bytes change places before they are widened: half as many permutations.
    ANTKV_DEVICE static void value_operand(const Load (&loads)[4], int i, u32 (&a)[2][4]) {
        for (int pair = 0; pair < 2; ++pair) {
            const u32 first = loads[2 * pair].quads[i], second = loads[2 * pair + 1].quads[i];
            for (int half = 0; half < 2; ++half) {
                const Quad channels = widen_e4m3(permute_bytes(first, second, half ? 0x7362 : 0x5140));
                a[half][2 * pair] = channels.low, a[half][2 * pair + 1] = channels.high;
            }
        }
    }

    // centroids: of the sub-vector that the quad is of.
    ANTKV_DEVICE static Place place(const u8* centroids, u32 quad) {
        const u32 s = quad * 4 / kSubVector, channel = quad * 4 % kSubVector;
        const bool odd = s % 2;
        // Opaque, lest they be worked out again for every tile.
        return {centroids + channel, opaque(s * 3 / 2), opaque(odd ? 0xfff0u : 0xfffu),
                opaque(odd ? kSubVector / 16u : (u32)kSubVector)};
    }
    ANTKV_DEVICE static Load load(const Place& place, const u8* codes, int behind_it) {
        const u32 pair = codes[place.code] | (u32)codes[place.code + 1] << 8;
        const u8* at = behind(place.table, pair & place.mask, place.factor) + behind_it;
        Load load;
        if constexpr (kPairs == 4) {
            const uint4 words = load_constant((const uint4*)at);
            load.quads[0] = words.x, load.quads[1] = words.y;
            load.quads[kPairs - 2] = words.z, load.quads[kPairs - 1] = words.w;
        } else {
            const uint2 words = load_constant((const uint2*)at);
            load.quads[0] = words.x, load.quads[1] = words.y;
        }
        return load;
    }
};
static_assert(kCentroids == 256 || kSubVector % 16 == 0, "a centroid in e4m3 is read 16 bytes at a time");
