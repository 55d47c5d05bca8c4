// Centroids in shared memory, and which of their channels each lane reads.
//
// A table row holds the centroids of all sub-vectors for one code: 256 bytes, so that an address is the code in one
// byte and a column in the other. The column fixes the bank. A warp reads quads (4 channels of one token), and lanes
// that the hardware serves together read different columns: no bank conflicts, whatever the codes are.
#pragma once

#include "layer.cuh"

constexpr bool kFp8 = ANTKV_FP8;
constexpr int kTableBytes = 256 * 256;
constexpr int kQuads = kHeadSize / 4;
constexpr int kQuadBytes = kFp8 ? 4 : 8;
// K and V fill the rows of a table each, or share them.
constexpr int kTables = kQuads * kQuadBytes / 128;
constexpr int kValueColumn = kTables == 2 ? kTableBytes : 128;
constexpr int kStagedBytes = kTables * kTableBytes;

// Lane = 4 row + column, as in the operands of mma.m16n8k16: `row` is a token of K or a channel of V^T.
struct Lane {
    int index, row, column;
    ANTKV_DEVICE explicit Lane(int thread) : index(thread % kWarp), row(index / 4), column(index % 4) {}
};

// --- K: each token is spread over the four lanes of a row, which hold both channels of a rotary pair.

constexpr int kPairs = kQuads / 8;  // pairs of quads per lane
constexpr int kOrders = 4;          // rows take their pairs in four different orders, one per two columns of mma's B

// The quad that is read first (or second) of pair `j`. Of 16 lanes with four orders, no two read the same 8 columns.
ANTKV_DEVICE int key_quad(int column, int order, int j, bool second) {
    const int turn = kPairs == 4 ? (j + order) % 4 : j ^ (order & 1);
    const bool upper = second != (kPairs == 2 && (order & 2));
    return kPairs * column + turn + (upper ? kQuads / 2 : 0);
}

// --- V: each lane holds a few channels of four tokens.

constexpr int kSets = kQuads / 8;  // quads per lane
// Lanes of different columns read different sets at a time; mma's B sorts them out.
ANTKV_DEVICE int value_set(int column, int step) { return (step + column) % kSets; }
ANTKV_DEVICE int value_quad(int row, int set) { return kSets * row + set; }

// --- Reading.

// Codes of `kCount` neighbouring sub-vectors in the lower bytes of a word.
template <int kCount>
ANTKV_DEVICE u32 load_codes(const u8* codes) {
    if constexpr (kCount == 4) return *(const u32*)codes;
    if constexpr (kCount == 2) return *(const u16*)codes;
    return *codes;
}

// `permute_bytes` selector: byte `index` of the codes above byte 0 of the column.
ANTKV_DEVICE u32 code_selector(int index) { return 0x5504u | (u32)index << 4; }

struct Quad {
    u32 low, high;  // channels 0, 1 and 2, 3 in float16
};

// Four e4m3 numbers as float16 of 2^-8 their value: the exponent is moved, not rebiased.
ANTKV_DEVICE Quad widen_e4m3(u32 word) {
    const u32 low = permute_bytes(word, 0, 0x1404), high = permute_bytes(word, 0, 0x3424);
    return {(low & 0x80008000u) | (low & 0x7f007f00u) >> 1, (high & 0x80008000u) | (high & 0x7f007f00u) >> 1};
}
constexpr float kFp8Unit = 256.0f;

ANTKV_DEVICE Quad load_quad(const u8* tables, u32 codes, u32 column, u32 selector) {
    const u8* at = tables + permute_bytes(codes, column, selector);
    if constexpr (kFp8) {
        return widen_e4m3(*(const u32*)at);
    } else {
        return {((const uint2*)at)->x, ((const uint2*)at)->y};
    }
}
