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
        return layer.num_centroids == kCentroids && layer.sub_vector_size <= kQuarter;
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
    // The same of rows of bfloat16: row(i). They have no low parts.
    template <typename Row>
    void load_bfloat16_tokens(int first, Row row) {
        for (int c = 0; c < num_sub_vectors_ * size_; c += 2 * kLanes) {
            const int have = std::min(num_sub_vectors_ * size_ - c, 2 * kLanes);
            Lanes pairs[kLanes] = {};
            for (int t = 0; t < kLanes; ++t) std::memcpy(&pairs[t], row(t) + c, have * sizeof(BFloat));
            transpose(pairs);
            for (int i = 0; i < have; i += size_) load_pairs_of(first, (c + i) / size_, pairs + i / 2);
        }
    }

    // Calls store(token, codes) for 16 tokens from `token` on, the last of which may be past `num_tokens`, and before it
    // compare(token) for the code of one where there is doubt. `of_bfloat16`: the rows are.
    template <typename Compare, typename Store>
    void find(int sub_vector, const uint16_t* centroids, const float* half_norms, int num_tokens, bool of_bfloat16,
              Compare compare, Store store) {
        // Of what distances are sums of: twice what they are off by, with what their last bits lost.
        const float tolerance = of_bfloat16 ? 0x1p-16f : 0x1.3p-14f;
        const float largest_norm = load_centroids(centroids, half_norms);
        for (int first = 0; first < num_tokens; first += kTokens) {
            // The two least of the groups' least distances come first, then those of the nearest group's.
            alignas(64) float distances[kCentroids * kTokens];
            Tiles::hold({tile(first, sub_vector), 0, (int64_t)num_sub_vectors_ * kTileElements});
            const auto multiply = [&](int centroid) {
                const Operand rows = {(const BFloat*)centroids_.get() + centroid * kTileDepth, 0, kTileElements};
                Tiles::product_with_held(rows, distances + centroid * kTokens, kTokens);
            };
            // Products are stored for long before they are compared.
            multiply(0);
            multiply(kRows);
            TwoLeast groups[2];
#pragma GCC unroll 8
            for (int centroid = 0; centroid < kCentroids; centroid += kRows) {
                if (centroid + 2 * kRows < kCentroids) multiply(centroid + 2 * kRows);
                for (int row = centroid; row < centroid + kRows; row += 2 * kGroup) {
                    for (int side = 0; side < 2; ++side) {
                        const float* group = distances + row * kTokens + side * kLanes;
                        groups[side].add(least_of_group(group), least_of_group(group + kGroup * kTokens), row / kGroup);
                    }
                }
            }
            for (int side = 0; side < 2; ++side) {
                const int begin = first + side * kLanes;
                const BitLanes group = groups[side].index(), at = group * (kGroup * kTokens) + lane_numbers();
                const auto distance = [&](int row) {
                    return gather_lanes(distances + row * kTokens + side * kLanes, at);
                };
                TwoLeast rows;
                for (int row = 0; row < kGroup; row += 2) rows.add(distance(row), distance(row + 1), row);
                const Lanes norm = load_lanes(norm_of(begin, sub_vector));
                const Lanes margin = (norm + 0.5f * largest_norm) * (largest_norm * tolerance);
                const IntLanes certain = smaller(rows.second, groups[side].second) - rows.first > margin;
                BitLanes code = group * kGroup + rows.index();
                if (any(~certain)) {
                    for (int lane = 0; lane < kLanes && begin + lane < num_tokens; ++lane)
                        if (!certain[lane]) code[lane] = (uint32_t)compare(begin + lane);
                }
                store(begin, code);
            }
        }
    }

  private:
    static constexpr int kTokens = 2 * kTileRows;  // multiplied at once
    static constexpr int kCentroids = 256, kRows = 2 * kTileRows, kQuarter = kTileDepth / 4, kPairs = kQuarter / 2;
    static constexpr int kGroup = 8;  // centroids that are told apart only where one of them is the nearest

    // Of 16 tokens: the two least numbers, whose last bits say which they are.
    struct TwoLeast {
        static constexpr uint32_t kIndices = 32;
        Lanes first = to_all_lanes(kInfinity), second = to_all_lanes(kInfinity);

        // Numbers `index` and `index` + 1.
        void add(Lanes even, Lanes odd, uint32_t index) {
            even = with_index(even, index), odd = with_index(odd, index + 1);
            const Lanes least = smaller(even, odd);
            second = smaller(smaller(second, larger(even, odd)), larger(first, least));
            first = smaller(first, least);
        }
        BitLanes index() const { return (BitLanes)first & (kIndices - 1); }

      private:
        static Lanes with_index(Lanes numbers, uint32_t index) {
            return (Lanes)(((BitLanes)numbers & ~(kIndices - 1)) | index);
        }
    };

    // The least of each of 16 tokens in kGroup rows.
    static Lanes least_of_group(const float* distances) {
        Lanes least[kGroup];
        for (int row = 0; row < kGroup; ++row) least[row] = load_lanes(distances + row * kTokens);
        for (int count = kGroup / 2; count; count /= 2)
            for (int row = 0; row < count; ++row) least[row] = smaller(least[row], least[row + count]);
        return least[0];
    }
    static BitLanes lane_numbers() { return BitLanes{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

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
        BFloat* pairs = tile(token, sub_vector);
        Lanes squares = {};
        for (int i = 0; i < kPairs; ++i) {
            BitLanes high[2] = {}, low[2] = {};
            for (int j = 0; j < 2 && 2 * i < size_; ++j) {
                const Lanes x = channels[2 * i + j];
                squares += x * x;
                high[j] = upper_half(x);
                low[j] = upper_half(x - (Lanes)high[j]);
            }
            store_pair(pairs, i, high[0] >> 16 | high[1], low[0] >> 16 | low[1]);
        }
        finish_tile(token, sub_vector, squares);
    }
    // pairs[i]: channels 2 i and 2 i + 1 of 16 tokens.
    void load_pairs_of(int token, int sub_vector, const Lanes* pairs) {
        Lanes squares = {};
        for (int i = 0; i < kPairs; ++i) {
            const BitLanes pair = 2 * i < size_ ? (BitLanes)pairs[i] : BitLanes{};
            const Lanes first = first_of_pairs(pair), second = second_of_pairs(pair);
            squares += first * first + second * second;
            store_pair(tile(token, sub_vector), i, pair, BitLanes{});
        }
        finish_tile(token, sub_vector, squares);
    }
    static void store_pair(BFloat* tile, int pair, BitLanes high, BitLanes low) {
        store_pairs(tile + pair * 2 * kLanes, high);
        store_pairs(tile + (kPairs + pair) * 2 * kLanes, low);
        store_pairs(tile + (2 * kPairs + pair) * 2 * kLanes, high);
    }
    // What norms are multiplied with; and the sub-vectors' own.
    void finish_tile(int token, int sub_vector, Lanes squares) {
        BFloat* ones = tile(token, sub_vector) + 3 * kPairs * 2 * kLanes;
        const BitLanes one = (BitLanes)to_all_lanes(1);
        store_pairs(ones, one >> 16 | one);
        store_pairs(ones + 2 * kLanes, one >> 16);
        store_pairs(ones + 4 * kLanes, BitLanes{});
        store_pairs(ones + 6 * kLanes, BitLanes{});
        store_lanes(norm_of(token, sub_vector), square_root(squares));
    }

    // Returns the largest of their norms.
    float load_centroids(const uint16_t* centroids, const float* half_norms) {
        return size_ == 8 ? load_centroids<8>(centroids, half_norms)
             : size_ == 4 ? load_centroids<4>(centroids, half_norms)
                          : load_centroids<2>(centroids, half_norms);
    }
    template <int kSize>
    float load_centroids(const uint16_t* centroids, const float* half_norms) {
        alignas(64) BFloat high[kCentroids * kSize], low[kCentroids * kSize];
        alignas(64) float numbers[kCentroids * kSize];
        widen<Float16>(centroids, kCentroids * kSize, numbers);
        for (int i = 0; i < kCentroids * kSize; i += kLanes) {
            const Lanes x = load_lanes(numbers + i);
            const BitLanes upper = upper_half(x), rest = (BitLanes)(x - (Lanes)upper);
            store_upper_halves(high + i, upper ^ 0x80000000);
            store_upper_halves(low + i, rest ^ 0x80000000);
        }
        Lanes largest = {};
        auto* row = (BFloat*)centroids_.get();
        for (int code = 0; code < kCentroids; code += kLanes) {
            const Lanes norm = load_lanes(half_norms + code);
            largest = larger(largest, norm);
            const Lanes rest = norm - without_lower_half(norm), last = rest - without_lower_half(rest);
            const BitLanes both = (BitLanes)norm >> 16 | ((BitLanes)rest & 0xFFFF0000);
            alignas(64) Lanes parts[2];
            interleave((Lanes)both, (Lanes)((BitLanes)last >> 16), parts[0], parts[1]);
            for (int i = 0; i < kLanes; ++i, row += kTileDepth) {
                const int at = (code + i) * kSize;
                store_quarter<kSize>(row, high + at);
                store_quarter<kSize>(row + kQuarter, high + at);
                store_quarter<kSize>(row + 2 * kQuarter, low + at);
                store_quarter<4>(row + 3 * kQuarter, (const BFloat*)parts + 4 * i);
            }
        }
        float norm = 0;
        for (int lane = 0; lane < kLanes; ++lane) norm = std::max(norm, largest[lane]);
        return std::sqrt(2 * norm);
    }
    static Lanes without_lower_half(Lanes x) { return (Lanes)((BitLanes)x & 0xFFFF0000); }
    static void store_upper_halves(BFloat* to, BitLanes bits) {
        typedef BFloat Halves __attribute__((vector_size(2 * kLanes)));
        const Halves halves = __builtin_convertvector(bits >> 16, Halves);
        std::memcpy(to, &halves, sizeof halves);
    }
    // kCount numbers, and zeros up to a quarter of a row.
    template <int kCount>
    static void store_quarter(BFloat* to, const BFloat* from) {
        const auto* numbers = (const __m128i*)from;
        _mm_storeu_si128((__m128i*)to, kCount == 8 ? _mm_loadu_si128(numbers)
                                     : kCount == 4 ? _mm_loadl_epi64(numbers)
                                                   : _mm_loadu_si32(numbers));
    }

    const int size_, num_sub_vectors_;
    Buffer centroids_, rows_, norms_;
};

}  // namespace antkv
