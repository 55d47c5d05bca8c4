// How a warp shares out the channels of a row: in quads, as the operands of mma.m16n8k16 hold them.
#pragma once

#include "layer.cuh"

constexpr int kWarps = ANTKV_WARPS;
constexpr int kThreads = kWarps * kWarp;
constexpr int kQuads = kHeadSize / 4;
constexpr int kPairs = kQuads / 8;  // of K: pairs of quads per lane, both halves of each rotary pair
constexpr int kSets = kQuads / 8;   // of V: quads per lane, for each of four tokens

// Lane = 4 row + column, as in the operands of mma.m16n8k16: `row` is a token of K or a channel of V^T.
struct Lane {
    int index, row, column;
    ANTKV_DEVICE explicit Lane(u32 thread) : index((int)(thread % kWarp)), row(index / 4), column(index % 4) {}
};

// Four channels of a token.
struct Quad {
    u32 low, high;  // channels 0, 1 and 2, 3 in float16
};

// Four e4m3 numbers, of `kFp8Unit` times less.
ANTKV_DEVICE Quad widen_e4m3(u32 word) {
    Quad quad;
    widen_e4m3x4(word, quad.low, quad.high);
    return quad;
}

// Four channels of four tokens as V^T, in registers of mma's A: of the first two channels and of the others.
ANTKV_DEVICE void transpose(const Quad (&tokens)[4], u32 (&a)[2][4]) {
    for (int half = 0; half < 2; ++half) {
        for (int pair = 0; pair < 2; ++pair) {
            const u32 first = half ? tokens[2 * pair].high : tokens[2 * pair].low;
            const u32 second = half ? tokens[2 * pair + 1].high : tokens[2 * pair + 1].low;
            a[half][2 * pair] = permute_bytes(first, second, 0x5410);
            a[half][2 * pair + 1] = permute_bytes(first, second, 0x7632);
        }
    }
}
