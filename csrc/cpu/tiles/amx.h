#pragma once

#if defined(__AMX_BF16__)

#include "operand.h"

namespace antkv {

// TDPBF16PS in the tile registers of AMX: 0 .. 3 hold sums, 4 and 5 rows of A, 6 and 7 columns of B.
struct AmxTiles {
    static constexpr bool kCheap = true;
    // Tile registers for this thread's use as long as this lives. Whoever configured them before finds them configured
    // again, though not with what was in them.
    class Scope {
      public:
        Scope() {
            _tile_storeconfig(&before_);
            Configuration ours = {};
            ours.palette = 1;
            for (int tile = 0; tile < 8; ++tile) {
                ours.row_bytes[tile] = sizeof(BFloat) * kTileDepth;
                ours.rows[tile] = kTileRows;
            }
            _tile_loadconfig(&ours);
        }
        ~Scope() {
            if (before_.palette) _tile_loadconfig(&before_);
            else _tile_release();
        }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        struct alignas(64) Configuration {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        };
        Configuration before_;
    };

    template <bool kAdd, typename Meanwhile>
    static void product(const Operand& a, const Operand& b, int depth, float* sums, int stride, Meanwhile meanwhile) {
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        const int64_t bytes = (int64_t)stride * sizeof(float);
        float* lower = sums + (int64_t)kTileRows * stride;
        written();
        if constexpr (kAdd) {
            _tile_loadd(0, sums, bytes);
            _tile_loadd(1, sums + kTileRows, bytes);
            _tile_loadd(2, lower, bytes);
            _tile_loadd(3, lower + kTileRows, bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const BFloat *left = a.tiles, *right = b.tiles;
        for (int i = 0; i < depth; ++i, left += a.next, right += b.next) {
            _tile_loadd(6, right, kRowBytes);
            _tile_loadd(4, left, kRowBytes);
            _tile_loadd(7, right + b.other, kRowBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, left + a.other, kRowBytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            meanwhile();
        }
        _tile_stored(0, sums, bytes);
        _tile_stored(1, sums + kTileRows, bytes);
        _tile_stored(2, lower, bytes);
        _tile_stored(3, lower + kTileRows, bytes);
        written();
    }

    static void few_rows(const Operand& a, const Operand& b, int, int depth, float* sums, int stride) {
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        written();
        _tile_zero(0);
        _tile_zero(1);
        const BFloat *left = a.tiles, *right = b.tiles;
        for (int i = 0; i < depth; ++i, left += a.next, right += b.next) {
            _tile_loadd(4, left, kRowBytes);
            _tile_loadd(6, right, kRowBytes);
            _tile_loadd(7, right + b.other, kRowBytes);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, sums, (int64_t)stride * sizeof(float));
        _tile_stored(1, sums + kTileRows, (int64_t)stride * sizeof(float));
        written();
    }

  private:
    // GCC does not know that tiles are loaded from memory and stored to it.
    static void written() { asm volatile("" ::: "memory"); }
};

}  // namespace antkv

#endif
