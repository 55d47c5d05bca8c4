// Rows of bfloat16 as factors of products by tiles.
#pragma once

#include "pages.h"
#include "tiles/operand.h"

namespace antkv {

inline int rounded_up(int count, int to) { return (count + to - 1) / to * to; }

// Channels of a row in tiles: zeros fill the last one.
inline int padded_head_size(const antkv_layer& layer) { return rounded_up(layer.head_size, kTileDepth); }

// 32 channels of a row of `size` from c on; zeros behind the last one.
inline BitLanes load_channels(const BFloat* row, int c, int size) {
    if (c + kTileDepth <= size) return load_pairs(row + c);
    BFloat channels[kTileDepth] = {};
    std::memcpy(channels, row + c, (size - c) * sizeof *row);
    return load_pairs(channels);
}
inline void store_channels(BFloat* row, int c, int size, BitLanes channels) {
    if (c + kTileDepth <= size) store_pairs(row + c, channels);
    else std::memcpy(row + c, &channels, (size - c) * sizeof *row);
}

// Up to 16 rows to tiles of a left factor, 32 channels each. row(i): the bfloat16 elements of a row.
template <typename Row>
inline void load_row_tiles(const antkv_layer& layer, int count, Row row, BFloat* tiles) {
    const int size = layer.head_size;
    for (int i = 0; i < count; ++i) {
        const BFloat* from = row(i);
        BFloat* to = tiles + i * kTileDepth;
        for (int c = 0; c < size; c += kTileDepth, to += kTileElements) store_pairs(to, load_channels(from, c, size));
    }
}

// 16 rows to tiles of a right factor: 32 channels and 16 columns, channels in pairs of neighbours.
template <typename Row>
inline void load_column_tiles(const antkv_layer& layer, Row row, BFloat* tiles) {
    const BFloat* rows[kTileRows];
    for (int lane = 0; lane < kTileRows; ++lane) rows[lane] = row(lane);
    const int size = layer.head_size;
    for (int c = 0; c < size; c += kTileDepth, tiles += kTileElements) {
        Lanes pairs[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) pairs[lane] = (Lanes)load_channels(rows[lane], c, size);
        transpose(pairs);
        std::memcpy(tiles, pairs, sizeof pairs);
    }
}

// Puts the channels of such tiles into the order in which codes have those of keys.
inline void order_column_tiles(const antkv_layer& layer, BFloat* tiles) {
    constexpr int kPair = 2 * kLanes;
    const int size = layer.head_size;
    const int32_t* order = layer.k_order;
    // A number before the first one, which is loaded and not used.
    alignas(64) BFloat as_they_are[kPair + kMaxHeadSize * kLanes];
    BFloat* channels = as_they_are + kPair;
    std::memcpy(channels, tiles, size * kLanes * sizeof *tiles);
    const auto column = [=](unsigned c) { return channels + c / 2 * kPair + c % 2; };
    for (int c = 0; c < size; c += 2, tiles += kPair) {
        const BitLanes first = load_pairs(column(order[c])), second = load_pairs(column(order[c + 1]) - 1);
        store_pairs(tiles, (first & 0xFFFF) | (second & 0xFFFF0000));
    }
}

}  // namespace antkv
