// What is asked once before the kernels serve anybody: what they were built from, and whether the processor's tiles
// multiply as they should.
#include <algorithm>
#include <utility>

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

// Decode's products are of tiles that are not whole: as many columns, or rows, as heads are multiplied together.
template <typename Tiles, int kHeads>
bool weigh_right() {
    using Values = typename Tiles::template Values<kHeads>;
    alignas(64) BFloat rows[kKeys][kValues], packed[Values::kWeightElements];
    alignas(64) float weights[kHeads][kKeys], sums[kHeads][kValues];
    for (int t = 0; t < kKeys; ++t) {
        for (int c = 0; c < kValues; ++c) rows[t][c] = to_bits(number(t, c));
        for (int h = 0; h < kHeads; ++h) weights[h][t] = number(h, t + 3);
    }
    for (int h = 0; h < kHeads; ++h) std::fill_n(sums[h], kValues, 1.0f);
    Values values;
    values.clear();
    Values::pack(weights[0], kKeys, kHeads, packed);
    values.add(rows[0], packed);
    values.add_to(sums[0], kValues, kHeads, kValues);
    for (int h = 0; h < kHeads; ++h) {
        for (int c = 0; c < kValues; ++c) {
            float sum = 1;
            for (int t = 0; t < kKeys; ++t) sum += number(h, t + 3) * number(t, c);
            if (sums[h][c] != sum) return false;
        }
    }
    return true;
}

template <typename Tiles, int kHeads>
bool dot_right() {
    using Logits = typename Tiles::template Logits<kHeads>;
    alignas(64) BFloat keys[kKeys][kInner], queries[kDepth * Logits::kQueryElements];
    alignas(64) float logits[kHeads][kKeys];
    for (int t = 0; t < kKeys; ++t)
        for (int k = 0; k < kInner; ++k) keys[t][k] = to_bits(number(t, k));
    for (int i = 0; i < kDepth; ++i) {
        BFloat rows[kHeads][kTileDepth];
        for (int h = 0; h < kHeads; ++h)
            for (int k = 0; k < kTileDepth; ++k) rows[h][k] = to_bits(number(h + 3, i * kTileDepth + k));
        BitLanes vectors[kHeads];
        std::memcpy(vectors, rows, sizeof vectors);
        Logits::pack(vectors, queries + i * Logits::kQueryElements);
    }
    Logits().template multiply<kDepth, false>(keys[0], queries, kHeads, logits[0], kKeys);
    for (int h = 0; h < kHeads; ++h) {
        for (int t = 0; t < kKeys; ++t) {
            float product = 0;
            for (int k = 0; k < kInner; ++k) product += number(h + 3, k) * number(t, k);
            if (logits[h][t] != product) return false;
        }
    }
    return true;
}

template <typename Tiles, int... kHeads>
bool decode_right(std::integer_sequence<int, kHeads...>) {
    if constexpr (Tiles::kIsFast)
        if (!(dot_right<Tiles, kHeads>() && ...) || !dot_right<Tiles, 16>()) return false;
    return (weigh_right<Tiles, kHeads>() && ...);
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

extern "C" const char* antkv_sources() noexcept { return ANTKV_SOURCES_DIGEST; }

extern "C" int32_t antkv_tiles_multiply_right(int32_t tiles) noexcept {
    antkv_layer layer = {};
    layer.tiles = tiles;
    bool right = false;
    antkv::with_tiles(layer, [&](auto of) {
        using Tiles = decltype(of);
        right = antkv::multiply_right<Tiles>() && antkv::decode_right<Tiles>(std::integer_sequence<int, 1, 2, 4, 8>{});
    });
    return right;
}
