// Rows of bfloat16 as factors of products by tiles.
#pragma once

#include "pages.h"
#include "tiles/operand.h"

namespace antkv {

inline int rounded_up(int count, int to) { return (count + to - 1) / to * to; }

// Channels of a row in tiles: zeros fill the last one.
inline int padded_head_size(const antkv_layer& layer) { return rounded_up(layer.head_size, kTileDepth); }

// Up to 16 rows to tiles of a left factor, 32 channels each. row(i): the bfloat16 elements of a row.
template <typename Row>
inline void load_row_tiles(const antkv_layer& layer, int count, Row row, BFloat* tiles) {
    const int size = layer.head_size, padded = padded_head_size(layer);
    for (int i = 0; i < count; ++i) {
        const BFloat* from = row(i);
        BFloat* to = tiles + i * kTileDepth;
        for (int c = 0; c < padded; c += kTileDepth, to += kTileElements) {
            const int have = std::min(size - c, kTileDepth);
            std::memcpy(to, from + c, have * sizeof *to);
            std::fill(to + have, to + kTileDepth, 0);
        }
    }
}

// 16 rows, in another order of channels where `order` is not null, to tiles of a right factor: 32 channels and 16 columns.
template <typename Row>
inline void load_column_tiles(const antkv_layer& layer, const int32_t* order, Row row, BFloat* tiles) {
    alignas(64) BFloat ordered[kTileRows][kMaxHeadSize];
    const int size = layer.head_size, padded = padded_head_size(layer);
    for (int lane = 0; lane < kTileRows; ++lane) {
        const BFloat* from = row(lane);
        BFloat* to = ordered[lane];
        if (order)
            for (int c = 0; c < size; ++c) to[c] = from[order[c]];
        else
            std::copy_n(from, size, to);
        std::fill(to + size, to + padded, 0);
    }
    for (int c = 0; c < padded; c += kTileDepth) {
        Lanes pairs[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) std::memcpy(&pairs[lane], ordered[lane] + c, sizeof(Lanes));
        transpose(pairs);
        for (int pair = 0; pair < kLanes; ++pair, tiles += 2 * kLanes) std::memcpy(tiles, &pairs[pair], sizeof(Lanes));
    }
}

}  // namespace antkv
