// What is asked once before the kernels serve anybody: what they were built from, and whether the processor's tiles
// multiply as they should.
#include <algorithm>

#include "tiles/tiles.h"

namespace antkv {
namespace {

constexpr int kDepth = 2, kSize = 2 * kTileRows, kInner = kDepth * kTileDepth;

// Small whole numbers and their halves, which bfloat16 holds; products and sums of these are exact.
float number(int row, int column) { return 0.5f * ((7 * row + 13 * column + row * column) % 31 - 15); }

BFloat to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (BFloat)(bits >> 16);
}

template <typename Tiles>
bool multiply_right() {
    alignas(64) BFloat a[2][kDepth][kTileRows][kTileDepth], b[2][kDepth][kTileRows][kTileDepth];
    alignas(64) float sums[kSize][kSize], few[kTileRows][kSize];
    for (int i = 0; i < kSize; ++i) {
        for (int k = 0; k < kInner; ++k) {
            a[i / kTileRows][k / kTileDepth][i % kTileRows][k % kTileDepth] = to_bits(number(i, k));
            BFloat(&pairs)[kTileRows][kTileDepth] = b[i / kTileRows][k / kTileDepth];
            pairs[k % kTileDepth / 2][2 * (i % kTileRows) + k % 2] = to_bits(number(k, i + 3));
        }
        std::fill_n(sums[i], kSize, 1.0f);
    }
    const Operand left = {a[0][0][0], kTileElements, kDepth * kTileElements};
    const Operand right = {b[0][0][0], kTileElements, kDepth * kTileElements};
    {
        [[maybe_unused]] const typename Tiles::Scope scope;
        Tiles::template product<true>(left, right, kDepth, sums[0], kSize, [] {});
        Tiles::few_rows(left, right, kTileRows, kDepth, few[0], kSize);
    }
    for (int i = 0; i < kSize; ++i) {
        for (int j = 0; j < kSize; ++j) {
            float product = 0;
            for (int k = 0; k < kInner; ++k) product += number(i, k) * number(k, j + 3);
            if (sums[i][j] != 1 + product || (i < kTileRows && few[i][j] != product)) return false;
        }
    }
    return true;
}

}  // namespace
}  // namespace antkv

extern "C" const char* antkv_sources() { return ANTKV_SOURCES_DIGEST; }

extern "C" int32_t antkv_tiles_multiply_right(int32_t tiles) {
    antkv_layer layer = {};
    layer.tiles = tiles;
    bool right = false;
    antkv::with_tiles(layer, [&](auto of) { right = antkv::multiply_right<decltype(of)>(); });
    return right;
}
