// Nearest centroids of many sub-vectors at once, by products of tiles.
#pragma once

#include <algorithm>
#include <cmath>

#include "memory.h"
#include "pages.h"
#include "tiles/tiles.h"

namespace antkv {

// Distances are products of one depth of tiles: a centroid's row is (-high, -high, -low, half its squared norm in three
// parts), a sub-vector's (high, low, high, 1, 1, 1), each number in parts that bfloat16 holds; a quarter of the depth each.
// Centroids, which are float16, and norms lose nothing; sub-vectors lose 2^-17 of themselves, and nothing where they are
// bfloat16. Products of two low parts, 2^-18, are left out.
//
// So a nearest centroid may be taken for another that is as near but for that. Where a second one is so near, the caller is
// asked to compare again in float32, so that codes are the same however they are computed.
template <typename Tiles>
class NearestTiles {
  public:
    static bool fits(const antkv_layer& layer) {
        return Tiles::kCheap && layer.num_centroids == kCentroids && layer.sub_vector_size <= kQuarter;
    }

    NearestTiles(const antkv_layer& layer, int max_tokens)
        : size_(layer.sub_vector_size), num_sub_vectors_(layer.head_size / size_),
          centroids_(floats(kCentroids * kTileDepth / 2)),
          rows_(floats((int64_t)max_tokens * num_sub_vectors_ * kTileDepth / 2)),
          norms_(floats((int64_t)max_tokens * num_sub_vectors_)) {}

    // 16 tokens from `first` on, a multiple of 16; rows: (16, head_size).
    void load_tokens(int first, const float* rows) {
        for (int c = 0; c < num_sub_vectors_ * size_; c += kLanes) {
            Lanes channels[kLanes];
            for (int t = 0; t < kLanes; ++t) channels[t] = load_lanes(rows + (int64_t)t * num_sub_vectors_ * size_ + c);
            transpose(channels);
            for (int i = 0; i < kLanes; i += size_) load_sub_vectors(first, (c + i) / size_, channels + i);
        }
    }

    // Writes the codes of `num_tokens` tokens, calling compare(token) for one where there is doubt. `codes` has room for a
    // multiple of 32 tokens. `of_bfloat16`: the rows are.
    template <typename Compare>
    void find(int sub_vector, const uint16_t* centroids, const float* half_norms, int num_tokens, bool of_bfloat16,
              Compare compare, uint8_t* codes) {
        // Of what distances are sums of: twice what they are off by, with what their last bits lost.
        const float tolerance = of_bfloat16 ? 0x1p-16f : 0x1.3p-14f;
        const float largest_norm = load_centroids(centroids, half_norms);
        for (int first = 0; first < num_tokens; first += kTokens) {
            Best best[2];
            // Products are stored for long before they are compared.
            alignas(64) float distances[3][kRows * kTokens];
            const auto multiply = [&](int chunk) {
                const Operand rows = {(const BFloat*)centroids_.get() + chunk * kRows * kTileDepth, 0, kTileElements};
                const Operand tokens = {tile(first, sub_vector), 0, (int64_t)num_sub_vectors_ * kTileElements};
                Tiles::template product<false>(rows, tokens, 1, distances[chunk % 3], kTokens, [] {});
            };
            constexpr int kChunks = kCentroids / kRows;
            multiply(0);
            multiply(1);
            for (int chunk = 0; chunk < kChunks; ++chunk) {
                if (chunk + 2 < kChunks) multiply(chunk + 2);
                add_both(best, chunk * kRows, distances[chunk % 3]);
            }
            for (int side = 0; side < 2; ++side) {
                const int begin = first + side * kLanes;
                const Lanes norm = load_lanes(norm_of(begin, sub_vector));
                const Lanes margin = (norm + 0.5f * largest_norm) * (largest_norm * tolerance);
                const IntLanes certain = best[side].second - best[side].first > margin, code = best[side].code();
                for (int lane = 0; lane < kLanes; ++lane) codes[begin + lane] = (uint8_t)code[lane];
                if (!any(~certain)) continue;
                for (int lane = 0; lane < kLanes && begin + lane < num_tokens; ++lane)
                    if (!certain[lane]) codes[begin + lane] = (uint8_t)compare(begin + lane);
            }
        }
    }

  private:
    static constexpr int kTokens = 2 * kTileRows;  // multiplied at once
    static constexpr int kCentroids = 256, kRows = 2 * kTileRows, kQuarter = kTileDepth / 4;

    // Of 16 tokens: the two least distances, whose last bits say which of 32 rows they stand in, and the first of those.
    struct Best {
        Lanes first = to_all_lanes(kInfinity), second = to_all_lanes(kInfinity);
        IntLanes rows = {};

        void add(int begin, Lanes least, Lanes other) {
            rows = least < first ? IntLanes{} + begin : rows;
            second = smaller(smaller(second, other), larger(first, least));
            first = smaller(first, least);
        }
        IntLanes code() const { return rows + ((IntLanes)first & (kRows - 1)); }
    };

    // 32 tokens: 16 and 16 of them, and even and odd rows of each, so that no minimum waits for the one before.
    static void add_both(Best (&best)[2], int begin, const float* distances) {
        Lanes low[2][2], next[2][2];
        for (int side = 0; side < 2; ++side)
            for (int i = 0; i < 2; ++i) low[side][i] = next[side][i] = to_all_lanes(kInfinity);
        BitLanes index[2] = {BitLanes{}, BitLanes{} + 1};
        for (int row = 0; row < kRows; row += 2) {
            for (int i = 0; i < 2; ++i) {
                for (int side = 0; side < 2; ++side) {
                    const BitLanes bits = (BitLanes)load_lanes(distances + (row + i) * kTokens + side * kLanes);
                    const Lanes distance = (Lanes)((bits & ~(uint32_t)(kRows - 1)) | index[i]);
                    next[side][i] = smaller(next[side][i], larger(low[side][i], distance));
                    low[side][i] = smaller(low[side][i], distance);
                }
                index[i] += 2;
            }
        }
        for (int side = 0; side < 2; ++side) {
            const Lanes *l = low[side], *n = next[side];
            best[side].add(begin, smaller(l[0], l[1]), smaller(larger(l[0], l[1]), smaller(n[0], n[1])));
        }
    }

    BFloat* tile(int token, int sub_vector) const {
        return (BFloat*)rows_.get() + ((int64_t)token / kTileRows * num_sub_vectors_ + sub_vector) * kTileElements;
    }
    float* norm_of(int token, int sub_vector) const {
        return &norms_[((int64_t)token / kLanes * num_sub_vectors_ + sub_vector) * kLanes];
    }

    // The nearest bfloat16, in the upper halves.
    static BitLanes upper_half(Lanes x) { return ((BitLanes)x + 0x8000) & 0xFFFF0000; }

    // channels[i]: channel i of 16 tokens.
    void load_sub_vectors(int token, int sub_vector, const Lanes* channels) {
        constexpr int kPairs = kQuarter / 2;
        BFloat* pairs = tile(token, sub_vector);
        const auto store_pair = [&](int pair, BitLanes first, BitLanes second) {
            store_pairs(pairs + pair * 2 * kLanes, first >> 16 | second);
        };
        Lanes squares = {};
        for (int i = 0; i < kPairs; ++i) {
            BitLanes high[2] = {}, low[2] = {};
            for (int j = 0; j < 2 && 2 * i < size_; ++j) {
                const Lanes x = channels[2 * i + j];
                squares += x * x;
                high[j] = upper_half(x);
                low[j] = upper_half(x - (Lanes)high[j]);
            }
            store_pair(i, high[0], high[1]);
            store_pair(kPairs + i, low[0], low[1]);
            store_pair(2 * kPairs + i, high[0], high[1]);
        }
        const BitLanes one = (BitLanes)to_all_lanes(1), zero = {};
        store_pair(3 * kPairs, one, one);
        store_pair(3 * kPairs + 1, one, zero);
        store_pair(3 * kPairs + 2, zero, zero);
        store_pair(3 * kPairs + 3, zero, zero);
        float* norms = norm_of(token, sub_vector);
        for (int lane = 0; lane < kLanes; ++lane) norms[lane] = std::sqrt(squares[lane]);
    }

    // Returns the largest of their norms.
    float load_centroids(const uint16_t* centroids, const float* half_norms) {
        alignas(64) uint32_t high[kCentroids * kQuarter], low[kCentroids * kQuarter];
        alignas(64) float numbers[kCentroids * kQuarter];
        widen<Float16>(centroids, kCentroids * size_, numbers);
        for (int i = 0; i < kCentroids * size_; i += kLanes) {
            const Lanes x = load_lanes(numbers + i);
            const BitLanes upper = upper_half(x), rest = (BitLanes)(x - (Lanes)upper);
            store_lanes((float*)high + i, (Lanes)((upper ^ 0x80000000) >> 16));
            store_lanes((float*)low + i, (Lanes)((rest ^ 0x80000000) >> 16));
        }
        auto* row = (BFloat*)centroids_.get();
        std::fill_n(row, kCentroids * kTileDepth, 0);
        float largest = 0;
        for (int code = 0; code < kCentroids; ++code, row += kTileDepth) {
            for (int k = 0; k < size_; ++k) {
                row[k] = row[kQuarter + k] = (BFloat)high[code * size_ + k];
                row[2 * kQuarter + k] = (BFloat)low[code * size_ + k];
            }
            largest = std::max(largest, half_norms[code]);
            float rest = half_norms[code];
            for (int part = 0; part < 3; ++part) {
                uint32_t bits;
                std::memcpy(&bits, &rest, sizeof bits);
                row[3 * kQuarter + part] = (BFloat)(bits >> 16);
                bits &= 0xFFFF0000;
                float taken;
                std::memcpy(&taken, &bits, sizeof bits);
                rest -= taken;
            }
        }
        return std::sqrt(2 * largest);
    }

    const int size_, num_sub_vectors_;
    Buffer centroids_, rows_, norms_;
};

}  // namespace antkv
