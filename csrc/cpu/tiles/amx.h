#pragma once

#if defined(__AMX_BF16__)

#include "registers.h"

namespace antkv {

// The tile registers of AMX.
struct AmxRegisters {
    struct alignas(64) Configuration {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };

    static Configuration configuration() {
        Configuration now;
        _tile_storeconfig(&now);
        return now;
    }
    static void configure(const TileShapes& shapes) {
        Configuration next = {};
        next.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            next.row_bytes[tile] = shapes.row_bytes[tile];
            next.rows[tile] = shapes.rows[tile];
        }
        _tile_loadconfig(&next);
    }
    static void restore(const Configuration& before) {
        if (before.palette) _tile_loadconfig(&before);
        else _tile_release();
    }

    // Assembly, as intrinsics take no template arguments, and GCC's do not say that they read and write memory.
    template <int kTile>
    static void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }
    // Rows of memory are `stride` bytes apart.
    template <int kTile>
    static void load(const void* from, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    static void store(void* to, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    // Sums += A B.
    template <int kSums, int kA, int kB>
    static void dot() {
        asm volatile("tdpbf16ps %%tmm%c0, %%tmm%c1, %%tmm%c2" ::"i"(kB), "i"(kA), "i"(kSums));
    }
};

using AmxTiles = RegisterTiles<AmxRegisters>;

}  // namespace antkv

#endif
