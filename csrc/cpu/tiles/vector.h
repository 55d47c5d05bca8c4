#pragma once

#if defined(__AVX512BF16__)

#include "operand.h"

namespace antkv {

// VDPBF16PS on the layouts of tiles: 16 rows of sums stay in registers over the whole inner dimension.
struct VectorTiles {
    static constexpr bool kCheap = false;
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

  private:
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
                    int32_t factors;
                    std::memcpy(&factors, left + row * kTileDepth + 2 * pair, sizeof factors);
                    total[row] = _mm512_dpbf16_ps(total[row], (__m512bh)_mm512_set1_epi32(factors), columns);
                }
            }
        }
        for (int row = 0; row < kRows; ++row) _mm512_storeu_ps(sums + (int64_t)row * stride, total[row]);
    }
};

}  // namespace antkv

#endif
