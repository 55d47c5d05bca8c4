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

    // Assembly, as GCC's intrinsics say of a configuration that they read or write its first eight bytes alone.
    static Configuration configuration() {
        Configuration now;
        asm volatile("sttilecfg %0" : "=m"(now));
        return now;
    }
    static void configure(const TileShapes& shapes) {
        Configuration next = {};
        next.palette = 1;
        for (int tile = 0; tile < 8; ++tile) {
            next.row_bytes[tile] = shapes.row_bytes[tile];
            next.rows[tile] = shapes.rows[tile];
        }
        apply(next);
    }
    static void restore(const Configuration& before) {
        if (before.palette) apply(before);
        else _tile_release();
    }

    // Intrinsics take no template arguments, and GCC's do not say that they read and write memory.
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

  private:
    static void apply(const Configuration& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
};

using AmxTiles = RegisterTiles<AmxRegisters>;

}  // namespace antkv

#endif
