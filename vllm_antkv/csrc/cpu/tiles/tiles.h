// Products of bfloat16 matrices by tiles, in one of three implementations with the same static functions:
//
//   AmxTiles      TDPBF16PS, in the tile registers of AMX.
//   VectorTiles   VDPBF16PS on the same layouts, for processors with AVX512-BF16 and without AMX (Zen 4 and later).
//   PlainTiles    C++ that computes what TDPBF16PS computes, bit by bit. It serves nobody: with it, everything that is
//                 written in tiles is tested on every machine.
//
// A tile is 16 rows of 32 bfloat16 numbers. Of a left factor A it holds 16 rows and 32 columns, as they are. Of a right
// factor B it holds 32 rows and 16 columns, pairs of rows side by side: row k is B[2 k][0], B[2 k + 1][0], B[2 k][1], ...
//
//   kIsFast       whether a product costs so much less than one in float32 that taking three for one pays.
//   Scope         a thread holds one while it multiplies; configures what there is to configure, and puts it back.
//   product<kAdd>(a, b, depth, sums, stride, meanwhile)
//                 sums[m][n] (+)= sum over k < 32 depth of A[m][k] B[k][n] for 32 rows and columns, `stride` floats from row
//                 to row. Calls meanwhile() `depth` times: work for the units that products leave idle. It must not touch
//                 the factors or the sums.
//   few_rows(a, b, rows, depth, sums, stride)
//                 sums[m][n] = the same for the first `rows` of 16 rows, and 32 columns, bit by bit. What is in the others of
//                 16 rows of sums is lost.
//
// All three take denormal numbers for 0, on the way in and out, and round to nearest, ties to even. They differ in the order
// of additions: TDPBF16PS adds up the first numbers of 16 pairs, and the second, then both, and that to the sum; VDPBF16PS
// adds a pair's products to the sum, one pair after the other.
#pragma once

#include "../antkv.h"
#include "amx.h"
#include "plain.h"
#include "vector.h"

namespace antkv {

// Calls `use` with the implementation that the layer names, which this build must have. For a layer without tiles, use is
// not called; returns whether it was.
template <typename Use>
inline bool with_tiles(const antkv_layer& layer, Use use) {
    switch (layer.tiles) {
#if defined(__AMX_BF16__)
        case ANTKV_AMX: return use(AmxTiles{}), true;
#endif
#if defined(__AVX512BF16__)
        case ANTKV_AVX512_BF16: return use(VectorTiles{}), true;
#elif !defined(__AVX512F__)
        case ANTKV_PLAIN_TILES: return use(PlainTiles{}), true;
#endif
        default: return false;
    }
}

}  // namespace antkv
