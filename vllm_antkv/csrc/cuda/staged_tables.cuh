// 256 centroids: tables in shared memory.
//
// A table row holds the centroids of all sub-vectors for one code: 256 bytes, so that an address is the code in one
// byte and a column in the other. The column fixes the bank. A warp reads quads, and lanes that the hardware serves
// together read different columns: no bank conflicts, whatever the codes are.
//
// A quad of two sub-vectors of 2 channels is read in two turns, a word each, for which all lanes are served together: lanes
// of the upper four rows read the second word of K first. Those of V are other quads, whose words the table has exchanged.
#pragma once

#include "lanes.cuh"

// Codes of `kCount` neighbouring sub-vectors in the lower bytes of a word.
template <int kCount>
ANTKV_DEVICE u32 load_codes(const u8* codes) {
    if constexpr (kCount == 4) return *(const u32*)codes;
    if constexpr (kCount == 2) return *(const u16*)codes;
    return *codes;
}

// Word `word` of quad `turn` of those that a lane reads, the first of them at a column: the byte of its code in a word of
// codes, above the column. The column lies in the upper half of the selector, at which `permute_bytes` does not look: one
// register for both. Opaque where it is kept, lest the compiler take it apart again.
ANTKV_DEVICE u32 look_up(u32 column, int turn, int word) {
    return opaque((column ^ word * 4) << 16 | 0x7706u | (u32)((turn * 4 / kSubVector + word) % 4) << 4);
}
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
    // Codes that a quad is of, and words of a lane's codes, of which those come first that it looks up first.
    static constexpr int kParts = larger(4 / kSubVector, 1), kCodeWords = larger(kKeyCodes / 4, 1);
    static_assert(kPairs == kSets, "a lane has as many words of codes of V as of each half of K");

    static constexpr int kBytes = kTables * kTableBytes;
    // A look-up of K reads 16 bytes where that is a centroid; 8 lanes are then served together, of two orders.
    static constexpr bool kWide = kSubVector == 8;
    static constexpr int kKeysAtOnce = kWide ? 2 : 1, kValuesAtOnce = 1;
    static constexpr int kOrders = kWide ? 2 : 4;
    static constexpr int kSetColumns = kSets;

    const u8* data;
    // Where head size 64 has too few pairs for all orders, the quads of a pair change places.
    static constexpr bool kSwapped = kPairs == 2;
    u32 key[kPairs][1 + kSwapped][kParts], value[kSets][kParts];
    // Where the lane's codes start in a row of codes.
    int key_code[2][kCodeWords], value_code[kCodeWords];
    const bool is_upper;

    ANTKV_DEVICE StagedTables(const Layer& layer, int head, Lane lane, u8* shared)
        : data(shared), is_upper(lane.row >= 4) {
        const u8* from = layer.tables + (i64)head * kBytes;
        for (int at = (int)threadIdx.x * 16; at < kBytes; at += kThreads * 16) copy16_async(shared + at, from + at);
        commit_copies();
        wait_for_copies<0>();
        sync_threads<kThreads>(1);
        const int order = lane.row % kOrders;
        for (int j = 0; j < kPairs; ++j) {
            for (int second = 0; second <= kSwapped; ++second) {
                const int quad = key_quad(lane.column, order, j, second);
                for (int part = 0; part < kParts; ++part)
                    key[j][second][part] = look_up(quad * kQuadBytes, quad % kPairs, kParts == 2 && part != is_upper);
            }
        }
        for (int i = 0; i < kSets; ++i) {
            const int set = value_set(lane.column, i), column = value_quad(lane.row, set) * kQuadBytes + kValueColumn;
            // The table's upper half has its words exchanged.
            const int exchanged = kTables == 2 && kParts == 2 && is_upper ? 4 : 0;
            for (int part = 0; part < kParts; ++part) value[i][part] = look_up(column ^ exchanged, set, part);
        }
        for (int word = 0; word < kCodeWords; ++word) {
            for (int second = 0; second < 2; ++second)
                key_code[second][word] = lane.column * kPairs * 4 / kSubVector +
                                         (takes_upper(order, second) ? kSubVectors / 2 : 0) +
                                         (word ^ order / 2 % kCodeWords) * 4;
            value_code[word] = lane.row * kSets * 4 / kSubVector + (word ^ lane.column / 2 % kCodeWords) * 4;
        }
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
    ANTKV_DEVICE static int value_set(int column, int turn) { return (turn ^ column) % kSets; }
    ANTKV_DEVICE static int value_quad(int row, int set) { return kSets * row + set; }

    ANTKV_DEVICE static float key_scale(const Layer&, int, int) { return 1; }
    static constexpr float value_unit = 1;
    ANTKV_DEVICE static float value_scale(const Layer&, int) { return 1; }

    struct ValueRow {
        u32 words[kCodeWords];
    };
    struct KeyRow {
        ValueRow halves[2];
    };
    struct KeyLoad {
        Quad quads[kKeysAtOnce];
    };
    struct ValueLoad {
        Quad quads[kValuesAtOnce];
    };
    ANTKV_DEVICE static ValueRow fetch(const u8* row, const int (&code)[kCodeWords]) {
        ValueRow codes;
        for (int word = 0; word < kCodeWords; ++word)
            codes.words[word] = load_codes<kKeyCodes / kCodeWords>(row + code[word]);
        return codes;
    }
    ANTKV_DEVICE KeyRow fetch_key(const u8* row) const { return {fetch(row, key_code[0]), fetch(row, key_code[1])}; }
    ANTKV_DEVICE ValueRow fetch_value(const u8* row) const { return fetch(row, value_code); }
    ANTKV_DEVICE KeyLoad load_keys(const KeyRow& codes, int j, bool second) const {
        if constexpr (kWide) {
            const uint4 words = *(const uint4*)(key_at(codes, j, second, 0));
            KeyLoad load;
            load.quads[0] = {words.x, words.y};
            load.quads[kKeysAtOnce - 1] = {words.z, words.w};
            return load;
        } else if constexpr (kParts == 2) {
            const u32 first = *(const u32*)key_at(codes, j, second, 0), other = *(const u32*)key_at(codes, j, second, 1);
            return {{is_upper ? Quad{other, first} : Quad{first, other}}};
        } else {
            return {{load_quad(key_at(codes, j, second, 0))}};
        }
    }
    ANTKV_DEVICE int query_offset(Lane, int j, bool second, bool turned) const {
        const u32 own = kSwapped ? key[j][second != turned][0] : key[turned ? j ^ 2 : j][0][0];
        return (kParts == 2 ? own >> 19 << 3 : own >> 16) + (second && !kSwapped ? kQuads / 2 * 8 : 0);
    }
    ANTKV_DEVICE const u8* key_at(const KeyRow& codes, int j, bool second, int part) const {
        const u8* table = data + (second && !kSwapped ? kQuads / 2 * kQuadBytes : 0);
        return table + place_in_table(codes.halves[second].words[j * kCodeWords / kPairs], key[j][second && kSwapped][part]);
    }
    ANTKV_DEVICE const u8* value_at(const ValueRow& codes, int turn, int part) const {
        return data + kValueTable + place_in_table(codes.words[turn * kCodeWords / kSets], value[turn][part]);
    }
    ANTKV_DEVICE ValueLoad load_values(const ValueRow& codes, int turn) const {
        if constexpr (kParts == 2) return {{{*(const u32*)value_at(codes, turn, 0), *(const u32*)value_at(codes, turn, 1)}}};
        else return {{load_quad(value_at(codes, turn, 0))}};
    }

    ANTKV_DEVICE static Quad key_operand(const KeyLoad& load, int i) { return load.quads[i]; }
    ANTKV_DEVICE static void value_operand(const ValueLoad (&loads)[4], int i, u32 (&a)[2][4]) {
        transpose({loads[0].quads[i], loads[1].quads[i], loads[2].quads[i], loads[3].quads[i]}, a);
    }

    ANTKV_DEVICE static Quad load_quad(const u8* at) { return {((const uint2*)at)->x, ((const uint2*)at)->y}; }
};
