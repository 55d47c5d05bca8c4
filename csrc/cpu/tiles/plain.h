#pragma once

#include <cmath>

#include "operand.h"

namespace antkv {

// What TDPBF16PS computes (Intel's manual, volume 2), in C++: sums of the first numbers of pairs and of the second, both by
// FMA from 0 on, are added, and then added to the sum. Denormal numbers count as 0, also in between.
struct PlainTiles {
    static constexpr bool kCheap = true;
    struct Scope {};

    template <bool kAdd, typename Meanwhile>
    static void product(const Operand& a, const Operand& b, int depth, float* sums, int stride, Meanwhile meanwhile) {
        for (int row = 0; !kAdd && row < 2 * kTileRows; ++row) std::memset(sums + (int64_t)row * stride, 0, 2 * sizeof(Lanes));
        for (int i = 0; i < depth; ++i) {
            for (int side = 0; side < 4; ++side) {
                add(a.tiles + i * a.next + side / 2 * a.other, b.tiles + i * b.next + side % 2 * b.other,
                    sums + side / 2 * kTileRows * (int64_t)stride + side % 2 * kTileRows, stride);
            }
            meanwhile();
        }
    }

    static void few_rows(const Operand& a, const Operand& b, int rows, int depth, float* sums, int stride) {
        for (int row = 0; row < rows; ++row) std::memset(sums + (int64_t)row * stride, 0, 2 * sizeof(Lanes));
        for (int i = 0; i < depth; ++i)
            for (int side = 0; side < 2; ++side)
                add(a.tiles + i * a.next, b.tiles + i * b.next + side * b.other, sums + side * kTileRows, stride, rows);
    }

  private:
    static void add(const BFloat* a, const BFloat* b, float* sums, int stride, int rows = kTileRows) {
        for (int row = 0; row < rows; ++row, a += kTileDepth, sums += stride) {
            Lanes first = {}, second = {};
            for (int pair = 0; pair < kTileDepth / 2; ++pair) {
                uint32_t factors;
                std::memcpy(&factors, a + 2 * pair, sizeof factors);
                const BitLanes both = BitLanes{} + factors, columns = load_pairs(b + pair * kTileDepth);
                first = add_product(first, first_of_pairs(both), first_of_pairs(columns));
                second = add_product(second, second_of_pairs(both), second_of_pairs(columns));
            }
            store_lanes(sums, flush(flush(load_lanes(sums)) + flush(first + second)));
        }
    }
    static Lanes add_product(Lanes sum, Lanes x, Lanes y) {
        x = flush(x), y = flush(y);
        for (int i = 0; i < kLanes; ++i) sum[i] = std::fma(x[i], y[i], sum[i]);
        return flush(sum);
    }
    static Lanes flush(Lanes x) {
        const BitLanes bits = (BitLanes)x;
        return (Lanes)((bits & 0x7F800000) == 0 ? bits & 0x80000000 : bits);
    }
};

}  // namespace antkv
