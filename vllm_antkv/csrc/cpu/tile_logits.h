// Logits of single queries to coded keys by products of tiles: decode.
#pragma once

#include "codes.h"
#include "tiles/tiles.h"

namespace antkv {

// Whether `TileLogits` can do a layer: there are tile registers, and channels that rotate fill whole tiles. What float32
// models compute stays in float32.
inline bool tile_logits_fit(const antkv_layer& layer) {
    const bool registers = layer.tiles == ANTKV_AMX || layer.tiles == ANTKV_PLAIN_TILES;
    return registers && layer.dtype == ANTKV_BFLOAT16 && (!layer.cos || layer.rotary_dim % kTileDepth == 0);
}

// 32 channels of keys, two times 16.
struct KeyChannels {
    enum Rotation { kNone, kHalves, kNeighbours } rotation;
    int first, second;  // channels; second is -1 where a head ends after the first

    // All channels of a head, in an order that has those together that rotate together.
    static int list(const antkv_layer& layer, KeyChannels (&all)[8]) {
        const int rotating = layer.cos ? layer.rotary_dim : 0, half = rotating / 2;
        int count = 0;
        for (int c = 0; c < rotating; c += 2 * kLanes) {
            if (layer.is_neox_style) all[count++] = {kHalves, c / 2, c / 2 + half};
            else all[count++] = {kNeighbours, c, c + kLanes};
        }
        for (int c = rotating; c < layer.head_size; c += 2 * kLanes)
            all[count++] = {kNone, c, c + kLanes < layer.head_size ? c + kLanes : -1};
        return count;
    }
};

// Cosines and sines for 32 channels. Neighbours have a cosine and a sine each, that of the first one negative.
struct ChannelAngles {
    Lanes cos[2], sin[2];

    static ChannelAngles at(const antkv_layer& layer, const KeyChannels& channels, int position) {
        ChannelAngles angles;
        const Angles row(layer, position);
        if (channels.rotation == KeyChannels::kHalves) {
            angles.cos[0] = load_lanes(row.cos + channels.first);
            angles.sin[0] = load_lanes(row.sin + channels.first);
            return angles;
        }
        for (int i = 0; i < 2; ++i) {
            for (int lane = 0; lane < kLanes; ++lane) {
                const int pair = (i ? channels.second : channels.first) / 2 + lane / 2;
                angles.cos[i][lane] = row.cos[pair];
                angles.sin[i][lane] = lane % 2 ? row.sin[pair] : -row.sin[pair];
            }
        }
        return angles;
    }
};

inline Lanes swap_neighbours(Lanes x) {
    return shuffled<1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14>(x, x);
}

// Logits of up to kHeads queries to the coded keys of a split.
//
// Channels are taken some at a time, for all tokens, so that their centroids stay in the first-level cache. Keys are rotated
// in float32 by their offset in a run of 64 tokens, and rounded to bfloat16 once; queries are rotated back by the run's
// position, and rounded too.
template <typename Tiles, int kHeads>
class TileLogits {
  public:
    // queries: (num_heads, head_size) in the order of codes.
    TileLogits(const antkv_layer& layer, const float* queries, int num_heads)
        : layer_(layer), queries_(queries), num_heads_(num_heads) {}

    // logits[h][t] = product of query h and token t, whose K rotates by position + t. codes(t): the codes of kKeys tokens from
    // t on; is_coded(t): whether any of them is asked for.
    template <typename Table, typename Codes, typename IsCoded>
    void run(Table centroids, int position, int count, Codes codes, IsCoded is_coded, float* logits, int stride) {
        position_ = position;
        KeyChannels channels[8];
        const int num_channels = KeyChannels::list(layer_, channels);
        for (int i = 0; i < num_channels; i += kDepth) {
            set_channels(channels + i, std::min(kDepth, num_channels - i), count);
            for (int first = 0; first < count; first += kKeys) {
                if (!is_coded(first)) continue;
                if (depth_ == kDepth) add<kDepth>(centroids, codes(first), first, i > 0, logits + first, stride);
                else add<1>(centroids, codes(first), first, i > 0, logits + first, stride);
            }
        }
    }

  private:
    using Logits = typename Tiles::template Logits<kHeads>;
    static constexpr int kDepth = 2;  // times 32 channels at a time
    static constexpr int kRun = 64;   // tokens whose queries are rotated back by the same position

    void set_channels(const KeyChannels* channels, int depth, int count) {
        depth_ = depth;
        run_ = -1;
        for (int i = 0; i < depth; ++i) {
            channels_[i] = channels[i];
            if (channels[i].rotation == KeyChannels::kNone) continue;
            for (int t = 0; t < std::min(kRun, count); ++t) {
                const auto angles = ChannelAngles::at(layer_, channels[i], t);
                const int sides = channels[i].rotation == KeyChannels::kHalves ? 1 : 2;
                for (int side = 0; side < sides; ++side) {
                    store_lanes(cos_[i][t][side], angles.cos[side]);
                    store_lanes(sin_[i][t][side], angles.sin[side]);
                }
            }
        }
    }

    template <int kTiles, typename Table>
    void add(Table centroids, const uint8_t* codes, int first, bool adds, float* logits, int stride) {
        if (first / kRun != run_) {
            run_ = first / kRun;
            for (int i = 0; i < kTiles; ++i) rotate_queries(i, position_ + run_ * kRun);
        }
        alignas(64) BFloat keys[kKeys * kTiles * kTileDepth];
        for (int i = 0; i < kTiles; ++i) {
            BFloat* to = keys + i * kTileDepth;
            switch (channels_[i].rotation) {
                case KeyChannels::kHalves:
                    rotate_keys<KeyChannels::kHalves, kTiles>(i, centroids, codes, first % kRun, to);
                    break;
                case KeyChannels::kNeighbours:
                    rotate_keys<KeyChannels::kNeighbours, kTiles>(i, centroids, codes, first % kRun, to);
                    break;
                default: rotate_keys<KeyChannels::kNone, kTiles>(i, centroids, codes, first % kRun, to);
            }
        }
        if (adds) products_.template multiply<kTiles, true>(keys, rotated_, num_heads_, logits, stride);
        else products_.template multiply<kTiles, false>(keys, rotated_, num_heads_, logits, stride);
    }

    // Decodes and rotates channels i of kKeys keys, the first of them `offset` tokens into the run.
    template <KeyChannels::Rotation kRotation, int kTiles, typename Table>
    void rotate_keys(int i, Table centroids, const uint8_t* codes, int offset, BFloat* keys) const {
        const unsigned first = channels_[i].first, second = std::max(channels_[i].second, 0);
        const Table from_first = centroids.from(first), from_second = centroids.from(second);
        const uint8_t *a_codes = codes + Table::byte_of(first), *b_codes = codes + Table::byte_of(second);
        const int64_t stride = layer_.code_bytes;
        for (int t = 0; t < kKeys; ++t, a_codes += stride, b_codes += stride, keys += kTiles * kTileDepth) {
            const Lanes a = sixteen_channels(from_first, a_codes, first % Table::kByteAligned);
            const Lanes b = sixteen_channels(from_second, b_codes, second % Table::kByteAligned);
            const auto &cos = cos_[i][offset + t], &sin = sin_[i][offset + t];
            if constexpr (kRotation == KeyChannels::kHalves) {
                const Lanes cosine = load_lanes(cos[0]), sine = load_lanes(sin[0]);
                store_pairs(keys, to_bfloat16(a * cosine - b * sine, b * cosine + a * sine));
            } else if constexpr (kRotation == KeyChannels::kNeighbours) {
                store_pairs(keys, to_bfloat16(a * load_lanes(cos[0]) + swap_neighbours(a) * load_lanes(sin[0]),
                                              b * load_lanes(cos[1]) + swap_neighbours(b) * load_lanes(sin[1])));
            } else {
                store_pairs(keys, to_bfloat16(a, b));
            }
        }
    }
    // Turns channels i of the queries back by a position.
    void rotate_queries(int i, int position) {
        const KeyChannels& channels = channels_[i];
        // From far apart, one row of angles per block; those of runs in it by the addition theorem.
        ChannelAngles angles = {};
        const int sides = channels.rotation == KeyChannels::kNeighbours ? 2 : channels.rotation == KeyChannels::kHalves ? 1 : 0;
        if (sides) {
            const auto block = ChannelAngles::at(layer_, channels, position / kBlockSize * kBlockSize);
            const auto rest = ChannelAngles::at(layer_, channels, position % kBlockSize);
            // Angles carry the magnitude, those of the keys too; it counts once.
            const float scale = 1 / (layer_.rotary_magnitude * layer_.rotary_magnitude);
            for (int side = 0; side < sides; ++side) {
                const Lanes cos0 = block.cos[side] * scale, sin0 = block.sin[side] * scale;
                angles.cos[side] = cos0 * rest.cos[side] - sin0 * rest.sin[side];
                angles.sin[side] = sin0 * rest.cos[side] + cos0 * rest.sin[side];
            }
        }
        BitLanes rows[kHeads] = {};
        for (int h = 0; h < num_heads_; ++h) {
            const float* query = queries_ + h * layer_.head_size;
            const Lanes a = load_lanes(query + channels.first);
            const Lanes b = channels.second < 0 ? Lanes{} : load_lanes(query + channels.second);
            switch (channels.rotation) {
                case KeyChannels::kHalves:
                    rows[h] = to_bfloat16(a * angles.cos[0] + b * angles.sin[0], b * angles.cos[0] - a * angles.sin[0]);
                    break;
                case KeyChannels::kNeighbours:
                    rows[h] = to_bfloat16(a * angles.cos[0] - swap_neighbours(a) * angles.sin[0],
                                          b * angles.cos[1] - swap_neighbours(b) * angles.sin[1]);
                    break;
                default: rows[h] = to_bfloat16(a, b);
            }
        }
        Logits::pack(rows, rotated_ + i * Logits::kQueryElements);
    }

    const antkv_layer& layer_;
    const float* queries_;
    const int num_heads_;
    Logits products_;
    KeyChannels channels_[kDepth];
    int depth_ = 0, position_ = 0, run_ = -1;
    alignas(64) float cos_[kDepth][kRun][2][kLanes], sin_[kDepth][kRun][2][kLanes];
    alignas(64) BFloat rotated_[kDepth * Logits::kQueryElements];
};

}  // namespace antkv
