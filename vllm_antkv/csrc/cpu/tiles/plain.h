#pragma once

#include <cmath>

#include "registers.h"

namespace antkv {

// Tile registers in C++, one set a thread.
struct PlainRegisters {
    struct Configuration {
        TileShapes shapes;
        bool is_set;
    };

    static Configuration configuration() { return configuration_; }
    static void configure(const TileShapes& shapes) { configuration_ = {shapes, true}; }
    static void restore(const Configuration& before) { configuration_ = before; }

    template <int kTile>
    static void zero() { std::memset(tiles_[kTile], 0, sizeof tiles_[kTile]); }
    template <int kTile>
    static void load(const void* from, int64_t stride) {
        zero<kTile>();
        for (int row = 0; row < rows(kTile); ++row)
            std::memcpy(tiles_[kTile][row], (const char*)from + row * stride, 4 * columns(kTile));
    }
    template <int kTile>
    static void store(void* to, int64_t stride) {
        for (int row = 0; row < rows(kTile); ++row)
            std::memcpy((char*)to + row * stride, tiles_[kTile][row], 4 * columns(kTile));
    }
    // What TDPBF16PS computes (Intel's manual, volume 2): sums of the first numbers of pairs and of the second, both by FMA from
    // 0 on, are added, and then added to the sum. Denormal numbers count as 0, also in between.
    template <int kSums, int kA, int kB>
    static void dot() {
        // AMX raises an exception for tiles that do not fit each other.
        if (rows(kSums) != rows(kA) || columns(kSums) != columns(kB) || columns(kA) != rows(kB)) __builtin_trap();
        for (int row = 0; row < rows(kSums); ++row) {
            Lanes first = {}, second = {};
            for (int pair = 0; pair < columns(kA); ++pair) {
                const BitLanes factors = BitLanes{} + tiles_[kA][row][pair];
                BitLanes columns;
                std::memcpy(&columns, tiles_[kB][pair], sizeof columns);
                first = add_product(first, first_of_pairs(factors), first_of_pairs(columns));
                second = add_product(second, second_of_pairs(factors), second_of_pairs(columns));
            }
            Lanes sums;
            std::memcpy(&sums, tiles_[kSums][row], sizeof sums);
            sums = flush(flush(sums) + flush(first + second));
            std::memcpy(tiles_[kSums][row], &sums, 4 * columns(kSums));
        }
    }

  private:
    static int rows(int tile) { return configuration_.shapes.rows[tile]; }
    static int columns(int tile) { return configuration_.shapes.row_bytes[tile] / 4; }
    static Lanes add_product(Lanes sum, Lanes x, Lanes y) {
        // What a processor takes for 0 is denormal after rounding, as if exponents had no end: from here on, sums round to
        // the smallest normal number.
        constexpr double kSmallest = 0x1p-126 * (1 - 0x1p-25);
        x = flush(x), y = flush(y);
        for (int i = 0; i < kLanes; ++i) {
            // As exact as rounding asks for: products have 16 digits.
            const double exact = (double)x[i] * y[i] + sum[i];
            sum[i] = std::abs(exact) < kSmallest ? std::copysign(0.0f, (float)exact) : (float)exact;
        }
        return sum;
    }
    static Lanes flush(Lanes x) {
        const BitLanes bits = (BitLanes)x;
        return (Lanes)((bits & 0x7F800000) == 0 ? bits & 0x80000000 : bits);
    }

    static inline thread_local Configuration configuration_ = {};
    static inline thread_local uint32_t tiles_[8][kTileRows][kLanes];
};

using PlainTiles = RegisterTiles<PlainRegisters>;

}  // namespace antkv
