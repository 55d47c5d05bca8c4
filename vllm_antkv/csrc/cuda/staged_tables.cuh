// 256 centroids: tables in shared memory.
//
// A table row holds the centroids of all sub-vectors for one code: 256 bytes, so that an address is the code in one
// byte and a column in the other. The column fixes the bank. A warp reads quads, and lanes that the hardware serves
// together read different columns: no bank conflicts, whatever the codes are.
#pragma once

#include "lanes.cuh"

// Codes of `kCount` neighbouring sub-vectors in the lower bytes of a word.
template <int kCount>
ANTKV_DEVICE u32 load_codes(const u8* codes) {
    if constexpr (kCount == 4) return *(const u32*)codes;
    if constexpr (kCount == 2) return *(const u16*)codes;
    return *codes;
}

// Byte `index` of a word of codes above a column. The column lies in the upper half of the selector, at which
// `permute_bytes` does not look: one register for both. Opaque where it is kept, lest the compiler take it apart again.
ANTKV_DEVICE u32 look_up(u32 column, int index) { return column << 16 | 0x7706u | (u32)index << 4; }
ANTKV_DEVICE u32 place_in_table(u32 codes, u32 look_up) { return permute_bytes(codes, look_up, look_up); }

// See `Tables`. What a lane reads depends on codes for its row alone; the columns are worked out once.
struct StagedTables {
    static constexpr int kTableBytes = 256 * 256;
    static constexpr int kQuadBytes = 8;
    // K and V fill the rows of a table each, or share them.
    static constexpr int kTables = kQuads * kQuadBytes / 128;
    static constexpr int kValueTable = kTables == 2 ? kTableBytes : 0, kValueColumn = kTables == 2 ? 0 : 128;
    // Neighbouring codes that a lane reads of a row; lanes may share one.
    static constexpr int kKeyCodes = larger(kPairs * 4 / kSubVector, 1);
    static constexpr int kValueCodes = larger(kSets * 4 / kSubVector, 1);

    static constexpr int kBytes = kTables * kTableBytes;
    // A look-up of K reads 16 bytes where that is a centroid; 8 lanes are then served together, of two orders.
    static constexpr bool kWide = kSubVector == 8;
    static constexpr int kKeysAtOnce = kWide ? 2 : 1, kValuesAtOnce = 1;
    static constexpr int kOrders = kWide ? 2 : 4;
    static constexpr int kSetColumns = kSets;

    const u8* data;
    // Where head size 64 has too few pairs for all orders, the quads of a pair change places.
    static constexpr bool kSwapped = kPairs == 2;
    u32 key[kPairs][1 + kSwapped], value[kSets];
    int key_code[2], value_code;  // where the lane's codes start in a row of codes

    ANTKV_DEVICE StagedTables(const Layer& layer, int head, Lane lane, u8* shared) : data(shared) {
        const u8* from = layer.tables + (i64)head * kBytes;
        for (int at = (int)threadIdx.x * 16; at < kBytes; at += kThreads * 16) copy16_async(shared + at, from + at);
        commit_copies();
        wait_for_copies<0>();
        sync_threads<kThreads>(1);
        const int order = lane.row % kOrders;
        for (int j = 0; j < kPairs; ++j) {
            for (int second = 0; second <= kSwapped; ++second) {
                const int quad = key_quad(lane.column, order, j, second);
                key[j][second] = opaque(look_up(quad * kQuadBytes, quad % kPairs * 4 / kSubVector));
            }
        }
        for (int second = 0; second < 2; ++second)
            key_code[second] = lane.column * kPairs * 4 / kSubVector + (takes_upper(order, second) ? kSubVectors / 2 : 0);
        for (int i = 0; i < kSets; ++i) {
            const int set = value_set(lane.column, i), quad = value_quad(lane.row, set);
            value[i] = opaque(look_up(quad * kQuadBytes + kValueColumn, set * 4 / kSubVector));
        }
        value_code = lane.row * kSets * 4 / kSubVector;
    }

    // Of the lanes that are served together, no two read the same columns.
    ANTKV_DEVICE static int key_quad(int column, int order, int j, bool second) {
        int turn = kPairs == 4 ? j ^ order : j ^ (order & 1);
        if (kWide) turn = kPairs == 4 ? j ^ 2 * order : j;
        return kPairs * column + turn + (takes_upper(order, second) ? kQuads / 2 : 0);
    }
    // At head size 64 there are too few pairs for all orders: some take the partners first.
    ANTKV_DEVICE static bool takes_upper(int order, bool second) {
        return second != (kPairs == 2 && (order & kOrders / 2));
    }
    // Lanes of different columns read different sets at a time.
    ANTKV_DEVICE static int value_set(int column, int turn) { return (turn + column) % kSets; }
    ANTKV_DEVICE static int value_quad(int row, int set) { return kSets * row + set; }

    ANTKV_DEVICE static float key_scale(const Layer&, int, int) { return 1; }
    static constexpr float value_unit = 1;
    ANTKV_DEVICE static float value_scale(const Layer&, int) { return 1; }

    struct KeyRow {
        u32 words[2];
    };
    using ValueRow = u32;
    struct KeyLoad {
        Quad quads[kKeysAtOnce];
    };
    struct ValueLoad {
        Quad quads[kValuesAtOnce];
    };
    ANTKV_DEVICE KeyRow fetch_key(const u8* row) const {
        return {load_codes<kKeyCodes>(row + key_code[0]), load_codes<kKeyCodes>(row + key_code[1])};
    }
    ANTKV_DEVICE ValueRow fetch_value(const u8* row) const { return load_codes<kValueCodes>(row + value_code); }
    ANTKV_DEVICE KeyLoad load_keys(KeyRow codes, int j, bool second) const {
        if constexpr (kWide) {
            const uint4 words = *(const uint4*)(key_at(codes, j, second));
            KeyLoad load;
            load.quads[0] = {words.x, words.y};
            load.quads[kKeysAtOnce - 1] = {words.z, words.w};
            return load;
        } else {
            return {load_quad(key_at(codes, j, second))};
        }
    }
    ANTKV_DEVICE int query_offset(Lane, int j, bool second, bool turned) const {
        const u32 own = kSwapped ? key[j][second != turned] : key[turned ? j ^ 2 : j][0];
        return (own >> 16) + (second && !kSwapped ? kQuads / 2 * 8 : 0);
    }
    ANTKV_DEVICE const u8* key_at(KeyRow codes, int j, bool second) const {
        const u8* table = data + (second && !kSwapped ? kQuads / 2 * kQuadBytes : 0);
        return table + place_in_table(codes.words[second], key[j][second && kSwapped]);
    }
    ANTKV_DEVICE ValueLoad load_values(ValueRow codes, int turn) const {
        return {load_quad(data + kValueTable + place_in_table(codes, value[turn]))};
    }

    ANTKV_DEVICE static Quad key_operand(const KeyLoad& load, int i) { return load.quads[i]; }
    ANTKV_DEVICE static void value_operand(const ValueLoad (&loads)[4], int i, u32 (&a)[2][4]) {
        transpose({loads[0].quads[i], loads[1].quads[i], loads[2].quads[i], loads[3].quads[i]}, a);
    }

    ANTKV_DEVICE static Quad load_quad(const u8* at) { return {((const uint2*)at)->x, ((const uint2*)at)->y}; }
};
