#pragma once

#if defined(__AVX512BF16__)

#include "../heads.h"
#include "operand.h"

namespace antkv {

// VDPBF16PS on the layouts of tiles. Sums stay in registers over the whole inner dimension.
struct VectorTiles {
    static constexpr bool kIsFast = false;
    struct Scope {};

    template <bool kAdd, typename Meanwhile>
    static void product(const Operand& a, const Operand& b, int depth, float* sums, int stride, Meanwhile meanwhile) {
        int done = 0;
        for (int side = 0; side < 4; ++side) {
            block<kAdd, kTileRows>({a.tiles + side / 2 * a.other, a.next, 0}, {b.tiles + side % 2 * b.other, b.next, 0}, depth,
                        sums + side / 2 * kTileRows * (int64_t)stride + side % 2 * kTileRows, stride);
            for (; done < depth * (side + 1) / 4; ++done) meanwhile();
        }
    }

    static void few_rows(const Operand& a, const Operand& b, int rows, int depth, float* sums, int stride) {
        for (int side = 0; side < 2; ++side) {
            const Operand columns = {b.tiles + side * b.other, b.next, 0};
            float* to = sums + side * kTileRows;
            if (rows <= 4) block<false, 4>(a, columns, depth, to, stride);
            else if (rows <= 8) block<false, 8>(a, columns, depth, to, stride);
            else block<false, kTileRows>(a, columns, depth, to, stride);
        }
    }

    // See `RegisterTiles`.
    template <typename Use>
    static void dot_rows(int num_heads, const BFloat* queries, const BFloat* const* rows, int size, int count,
                         Use use) {
        for_heads(num_heads, [&](auto heads, int h) {
            for (int first = 0; first < count; first += kLanes)
                dot_rows<heads>(h, queries + (int64_t)h * size, rows + first, size, first, use);
        });
    }

  private:
    // Of kLanes rows.
    template <int kHeads, typename Use>
    static void dot_rows(int h, const BFloat* queries, const BFloat* const* rows, int size, int first, Use use) {
        Vec partial[kHeads][kLanes];
        for (int t = 0; t < kLanes; ++t) {
            __m512 total[kHeads] = {};
            for (int c = 0; c < size; c += kTileDepth) {
                const __m512bh key = load_row(rows[t] + c);
                for (int i = 0; i < kHeads; ++i)
                    total[i] = _mm512_dpbf16_ps(total[i], load_row(queries + i * size + c), key);
            }
            for (int i = 0; i < kHeads; ++i) partial[i][t] = (Vec)total[i];
        }
        for (int i = 0; i < kHeads; ++i) use(h + i, first, (Lanes)sums(partial[i]));
    }
    template <bool kAdd, int kRows>
    static void block(const Operand& a, const Operand& b, int depth, float* sums, int stride) {
        __m512 total[kRows];
        for (int row = 0; row < kRows; ++row)
            total[row] = kAdd ? _mm512_loadu_ps(sums + (int64_t)row * stride) : _mm512_setzero_ps();
        const BFloat *left = a.tiles, *right = b.tiles;
        for (int i = 0; i < depth; ++i, left += a.next, right += b.next) {
            for (int pair = 0; pair < kTileDepth / 2; ++pair) {
                const __m512bh columns = (__m512bh)_mm512_loadu_si512(right + pair * kTileDepth);
                for (int row = 0; row < kRows; ++row) {
                    const __m512bh factors = to_all_lanes(left + row * kTileDepth + 2 * pair);
                    total[row] = _mm512_dpbf16_ps(total[row], factors, columns);
                }
            }
        }
        for (int row = 0; row < kRows; ++row) _mm512_storeu_ps(sums + (int64_t)row * stride, total[row]);
    }
    static __m512bh load_row(const BFloat* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static __m512bh to_all_lanes(const BFloat* pair) {
        int32_t both;
        std::memcpy(&both, pair, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }

  public:
    // Sums of rows by weights of a few heads: see `RegisterTiles`.
    template <int kHeads>
    class Values {
      public:
        // Weights of kKeys tokens and up to kHeads heads, as they are.
        static constexpr int kWeightElements = kKeys * kHeads;
        static void pack(const float* weights, int stride, int num_heads, BFloat* to) {
            for (int h = 0; h < kHeads; ++h, to += kKeys) {
                if (h < num_heads) {
                    const float* row = weights + (int64_t)h * stride;
                    store_pairs(to, to_bfloat16(load_lanes(row), load_lanes(row + kLanes)));
                } else {
                    store_pairs(to, BitLanes{});
                }
            }
        }

        void clear() {
            for (auto& half : sums_)
                for (auto& head : half)
                    for (auto& part : head) part = _mm512_setzero_ps();
        }
        // rows: (kKeys, kValues).
        void add(const BFloat* rows, const BFloat* weights) {
            add_rows([=](int t, int half) { return load_pairs(rows + t * kValues + half * kTileDepth); }, 2, weights);
        }
        // The same of rows wherever they lie: row(t, half) is channels 32 half .. 32 half + 32 of one.
        template <typename Row>
        void add_rows(Row row, int num_halves, const BFloat* weights) {
            for (int half = 0; half < num_halves; ++half) {
                for (int set = 0; set < kHeads; set += kTogether) {
                    __m512 total[kTogether][2];
                    for (int h = 0; h < kTogether; ++h)
                        for (int i = 0; i < 2; ++i) total[h][i] = sums_[half][set + h][i];
                    for (int t = 0; t < kKeys; t += 2) {
                        const __m512i even = (__m512i)row(t, half), odd = (__m512i)row(t + 1, half);
                        const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
                        const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
                        for (int h = 0; h < kTogether; ++h) {
                            const __m512bh weight = to_all_lanes(weights + (set + h) * kKeys + t);
                            total[h][0] = _mm512_dpbf16_ps(total[h][0], low, weight);
                            total[h][1] = _mm512_dpbf16_ps(total[h][1], high, weight);
                        }
                    }
                    for (int h = 0; h < kTogether; ++h)
                        for (int i = 0; i < 2; ++i) sums_[half][set + h][i] = total[h][i];
                }
            }
        }
        // out[h][c] += sums, of the first `size` of kValues channels.
        void add_to(float* out, int stride, int num_heads, int size) const {
            for (int h = 0; h < num_heads; ++h) {
                for (int half = 0; half < 2; ++half) {
                    // Four channels of the one, four of the other.
                    const __m512i first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
                    const __m512i last = _mm512_add_epi32(first, _mm512_set1_epi32(8));
                    const __m512 low = sums_[half][h][0], high = sums_[half][h][1];
                    const __m512 parts[2] = {_mm512_permutex2var_ps(low, first, high), _mm512_permutex2var_ps(low, last, high)};
                    for (int i = 0; i < 2; ++i) {
                        const int c = half * kTileDepth + i * kLanes;
                        float* to = out + (int64_t)h * stride + c;
                        if (c < size) _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), parts[i]));
                    }
                }
            }
        }

      private:
        static constexpr int kTogether = kHeads < 8 ? kHeads : 8;  // whose sums are in registers at once
        __m512 sums_[2][kHeads][2];
    };
};

}  // namespace antkv

#endif
