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
    for (int i = 0; i < count; ++i) {
        const BFloat* from = row(i);
        BFloat* to = tiles + i * kTileDepth;
        for (int c = 0; c < layer.head_size; c += kTileDepth, to += kTileElements)
            store_pairs(to, load_channels(from, c, layer.head_size));
    }
}

// Channels `first` and `second` of 16 rows in pairs, of all their channels in pairs of neighbours.
inline BitLanes channel_pair(const BitLanes* neighbours, int first, int second) {
    const BitLanes low = neighbours[first / 2] >> 16 * (first % 2), high = neighbours[second / 2] << 16 * (1 - second % 2);
    return (low & 0xFFFF) | (high & 0xFFFF0000);
}

// 16 rows, in another order of channels where `order` is not null, to tiles of a right factor: 32 channels and 16 columns.
template <typename Row>
inline void load_column_tiles(const antkv_layer& layer, const int32_t* order, Row row, BFloat* tiles) {
    const BFloat* rows[kTileRows];
    for (int lane = 0; lane < kTileRows; ++lane) rows[lane] = row(lane);
    BitLanes neighbours[kMaxHeadSize / 2];
    const int size = layer.head_size, num_pairs = padded_head_size(layer) / 2;
    for (int pair = 0; pair < num_pairs; pair += kLanes) {
        Lanes pairs[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) pairs[lane] = (Lanes)load_channels(rows[lane], 2 * pair, size);
        transpose(pairs);
        std::memcpy(neighbours + pair, pairs, sizeof pairs);
    }
    for (int pair = 0; pair < num_pairs; ++pair, tiles += 2 * kLanes) {
        const int c = 2 * pair;
        store_pairs(tiles, order && c < size ? channel_pair(neighbours, order[c], order[c + 1]) : neighbours[pair]);
    }
}

}  // namespace antkv
