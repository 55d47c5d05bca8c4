// 4,096 centroids: tables in the L2 cache.
//
// At head size 128 the centroids of a KV head are 1 MB for K and 1 MB for V: more than shared memory, less than L2. So
// nothing is staged. A lane reads 16 bytes at a time, and the lanes that hold a token's neighbouring channels read
// neighbouring bytes: whole centroids (32 or 64 bytes), never a part of one of the 32 bytes that L2 hands out.
#pragma once

#include "lanes.cuh"

// See `Tables`.
struct CachedTables {
    static constexpr int kBytes = 0;
    static constexpr int kKeysAtOnce = 2, kValuesAtOnce = 2;
    static constexpr int kOrders = 1;
    // Fewer queries at a time, and half the registers of sums.
    static constexpr int kSetColumns = 2;

    const u8 *keys, *values;
    const Lane lane;

    ANTKV_DEVICE CachedTables(const Layer& layer, int head, Lane lane, u8*)
        : keys(table(layer.k_centroids, head)), values(table(layer.v_centroids, head)), lane(lane) {}

    ANTKV_DEVICE static int key_quad(int column, int, int j, bool second) {
        return (j / 2 * 4 + column) * 2 + j % 2 + (second ? kQuads / 2 : 0);
    }
    ANTKV_DEVICE static int value_set(int, int turn) { return turn; }
    ANTKV_DEVICE static int value_quad(int row, int set) { return (set / 2 * 8 + row) * 2 + set % 2; }

    ANTKV_DEVICE static float key_scale(const Layer&, int, int) { return 1; }

    using KeyCodes = const u8*;
    using ValueCodes = const u8*;
    struct Load {
        Quad quads[2];
    };
    using KeyLoad = Load;
    using ValueLoad = Load;
    ANTKV_DEVICE KeyCodes key_codes(const u8* row) const { return row; }
    ANTKV_DEVICE ValueCodes value_codes(const u8* row) const { return row; }
    ANTKV_DEVICE Load load_keys(KeyCodes codes, int j, bool second) const {
        return load(keys, codes, key_quad(lane.column, 0, j, second));
    }
    ANTKV_DEVICE Load load_values(ValueCodes codes, int turn) const {
        return load(values, codes, value_quad(lane.row, turn));
    }

    ANTKV_DEVICE static const u8* table(const u16* centroids, int head) {
        return (const u8*)(centroids + (i64)head * kCentroids * kHeadSize);
    }
    // The 8 channels from `quad` on of what a row of codes stands for. Codes lie two in three bytes.
    ANTKV_DEVICE static Load load(const u8* table, const u8* codes, int quad) {
        const int s = quad * 4 / kSubVector, channel = quad * 4 % kSubVector;
        const u32 pair = codes[s * 3 / 2] | (u32)codes[s * 3 / 2 + 1] << 8;
        const u32 code = pair >> s % 2 * 4 & 0xfff;
        const u32 entry = (s * kCentroids + code) * kSubVector + channel;
        const uint4 words = load_constant((const uint4*)(table + entry * 2));
        return {{{words.x, words.y}, {words.z, words.w}}};
    }
};
