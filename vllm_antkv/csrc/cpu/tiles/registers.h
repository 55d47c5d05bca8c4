// Everything that is written in tile registers, for AMX and for plain C++ alike.
#pragma once

#include <initializer_list>

#include "../heads.h"
#include "operand.h"

namespace antkv {

// Shapes of eight tile registers: rows, and bytes of a row.
struct TileShapes {
    uint8_t rows[8];
    uint16_t row_bytes[8];

    static constexpr TileShapes whole() {
        return {{16, 16, 16, 16, 16, 16, 16, 16}, {64, 64, 64, 64, 64, 64, 64, 64}};
    }
};

// Registers: see `AmxRegisters`.
template <typename Registers>
struct RegisterTiles {
    static constexpr bool kIsFast = true;

    // Tile registers for this thread's use as long as this lives. Whoever configured them before finds them configured
    // again, though not with what was in them.
    class Scope {
      public:
        explicit Scope(const TileShapes& shapes = TileShapes::whole()) : before_(Registers::configuration()) {
            Registers::configure(shapes);
        }
        ~Scope() { Registers::restore(before_); }
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;

      private:
        typename Registers::Configuration before_;
    };

    // 0 .. 3 hold sums, 4 and 5 rows of A, 6 and 7 columns of B.
    template <bool kAdd, typename Meanwhile>
    static void product(const Operand& a, const Operand& b, int depth, float* sums, int stride, Meanwhile meanwhile) {
        using R = Registers;
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        const int64_t bytes = (int64_t)stride * sizeof(float);
        float* lower = sums + (int64_t)kTileRows * stride;
        if constexpr (kAdd) {
            R::template load<0>(sums, bytes);
            R::template load<1>(sums + kTileRows, bytes);
            R::template load<2>(lower, bytes);
            R::template load<3>(lower + kTileRows, bytes);
        } else {
            R::template zero<0>();
            R::template zero<1>();
            R::template zero<2>();
            R::template zero<3>();
        }
        const BFloat *left = a.tiles, *right = b.tiles;
        for (int i = 0; i < depth; ++i, left += a.next, right += b.next) {
            R::template load<6>(right, kRowBytes);
            R::template load<4>(left, kRowBytes);
            R::template load<7>(right + b.other, kRowBytes);
            R::template dot<0, 4, 6>();
            R::template dot<1, 4, 7>();
            R::template load<5>(left + a.other, kRowBytes);
            R::template dot<2, 5, 6>();
            R::template dot<3, 5, 7>();
            meanwhile();
        }
        R::template store<0>(sums, bytes);
        R::template store<1>(sums + kTileRows, bytes);
        R::template store<2>(lower, bytes);
        R::template store<3>(lower + kTileRows, bytes);
    }

    // `product` of one depth with columns that stay in registers from `hold` on.
    static void hold(const Operand& b) {
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        Registers::template load<6>(b.tiles, kRowBytes);
        Registers::template load<7>(b.tiles + b.other, kRowBytes);
    }
    static void product_with_held(const Operand& a, float* sums, int stride) {
        using R = Registers;
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        const int64_t bytes = (int64_t)stride * sizeof(float);
        float* lower = sums + (int64_t)kTileRows * stride;
        R::template zero<0>();
        R::template zero<1>();
        R::template zero<2>();
        R::template zero<3>();
        R::template load<4>(a.tiles, kRowBytes);
        R::template dot<0, 4, 6>();
        R::template dot<1, 4, 7>();
        R::template load<5>(a.tiles + a.other, kRowBytes);
        R::template dot<2, 5, 6>();
        R::template dot<3, 5, 7>();
        R::template store<0>(sums, bytes);
        R::template store<1>(sums + kTileRows, bytes);
        R::template store<2>(lower, bytes);
        R::template store<3>(lower + kTileRows, bytes);
    }

    // All 16 rows are multiplied, whatever their number.
    static void few_rows(const Operand& a, const Operand& b, int, int depth, float* sums, int stride) {
        using R = Registers;
        constexpr int64_t kRowBytes = sizeof(BFloat) * kTileDepth;
        const int64_t bytes = (int64_t)stride * sizeof(float);
        R::template zero<0>();
        R::template zero<1>();
        const BFloat *left = a.tiles, *right = b.tiles;
        for (int i = 0; i < depth; ++i, left += a.next, right += b.next) {
            R::template load<4>(left, kRowBytes);
            R::template load<6>(right, kRowBytes);
            R::template load<7>(right + b.other, kRowBytes);
            R::template dot<0, 4, 6>();
            R::template dot<1, 4, 7>();
        }
        R::template store<0>(sums, bytes);
        R::template store<1>(sums + kTileRows, bytes);
    }

    // Products of up to kHeads queries, at most 16, with keys: queries are a factor B of few columns.
    template <int kHeads>
    class Logits {
      public:
        static constexpr int kQueryElements = kTileDepth * kHeads;  // of 32 channels

        // rows: 32 channels of each head, in bfloat16.
        static void pack(const BitLanes* rows, BFloat* to) {
            for (int h = 0; h < kHeads; ++h)
                for (int pair = 0; pair < kTileDepth / 2; ++pair)
                    std::memcpy(to + 2 * (pair * kHeads + h), (const BFloat*)&rows[h] + 2 * pair, 2 * sizeof(BFloat));
        }

        // logits[h][t] (+)= queries[h] . keys[t] of kKeys tokens. keys: (kKeys, 32 kDepth); queries: kDepth times what
        // `pack` writes.
        template <int kDepth, bool kAdd>
        void multiply(const BFloat* keys, const BFloat* queries, int num_heads, float* logits, int stride) {
            multiply(keys, queries, kDepth);
            for_products(num_heads, [&](int h, int first, Lanes products) {
                float* to = logits + (int64_t)h * stride + first;
                store_lanes(to, kAdd ? load_lanes(to) + products : products);
            });
        }
        // See `RegisterTiles::dot_rows`.
        template <typename Use>
        void dot_rows(const BFloat* queries, int num_heads, const BFloat* const* rows, int size, int count, Use use) {
            constexpr int kMaxDepth = 8;
            alignas(64) BFloat packed[kMaxDepth * kQueryElements], keys[kKeys * kMaxDepth * kTileDepth];
            for (int c = 0; c < size; c += kTileDepth) {
                BitLanes channels[kHeads] = {};
                for (int h = 0; h < num_heads; ++h) channels[h] = load_pairs(queries + (int64_t)h * size + c);
                pack(channels, packed + c * kHeads);
            }
            for (int first = 0; first < count; first += kKeys) {
                for (int c = 0; c < size; c += kTileDepth)
                    copy_rows([=](int t) { return load_pairs(rows[first + t] + c); }, keys + c, size);
                multiply(keys, packed, size / kTileDepth);
                for_products(num_heads, [&](int h, int row, Lanes products) { use(h, first + row, products); });
            }
        }

      private:
        void multiply(const BFloat* keys, const BFloat* queries, int depth) {
            using R = Registers;
            const int64_t key_bytes = sizeof(BFloat) * kTileDepth * depth;
            const BFloat* lower = keys + (int64_t)kTileRows * depth * kTileDepth;
            R::template zero<0>();
            R::template zero<1>();
            for (int i = 0; i < depth; ++i, keys += kTileDepth, lower += kTileDepth, queries += kQueryElements) {
                R::template load<6>(queries, sizeof(float) * kHeads);
                R::template load<2>(keys, key_bytes);
                R::template dot<0, 2, 6>();
                R::template load<4>(lower, key_bytes);
                R::template dot<1, 4, 6>();
            }
        }
        // Calls use(head, first row, products with 16 rows).
        template <typename Use>
        static void for_products(int num_heads, Use use) {
            alignas(64) float products[kKeys * kHeads];
            Registers::template store<0>(products, sizeof(float) * kHeads);
            Registers::template store<1>(products + kTileRows * kHeads, sizeof(float) * kHeads);
            for (int first = 0; first < kKeys; first += kLanes) {
                Lanes rows[kHeads];
                for (int i = 0; i < kHeads; ++i) rows[i] = load_lanes(products + first * kHeads + i * kLanes);
                deinterleave<kHeads>(rows);
                for (int h = 0; h < num_heads; ++h) use(h, first, rows[h]);
            }
        }

        static constexpr TileShapes shapes() {
            TileShapes shapes = TileShapes::whole();
            for (int tile : {0, 1, 6, 7}) shapes.row_bytes[tile] = sizeof(float) * kHeads;
            return shapes;
        }
        Scope scope_{shapes()};
    };

    // Calls use(h, first, products) with queries[h] . rows[t] for `num_heads` queries, `size` elements apart, and kLanes
    // rows from `first` on, wherever they lie: some more than `count`, up to a multiple of kKeys. size: a multiple of 32.
    template <typename Use>
    static void dot_rows(int num_heads, const BFloat* queries, const BFloat* const* rows, int size, int count,
                         Use use) {
        for_tile_heads<16>(num_heads, [&](auto heads, int first_head, int few) {
            Logits<heads>().dot_rows(queries + (int64_t)first_head * size, few, rows, size, count,
                                     [&](int h, int first, Lanes products) { use(first_head + h, first, products); });
        });
    }

    // Sums of rows by weights of up to kHeads heads, at most 8.
    //
    // Rows are a factor B as they are, neighbouring channels in pairs: every weight stands in two rows of A, beside 0, once
    // for the first of pairs and once for the second. So nothing needs to be interleaved.
    template <int kHeads>
    class Values {
      public:
        static constexpr int kWeightElements = kKeys / kTileRows * 2 * kHeads * kTileDepth;

        // Weights of kKeys tokens. weights: `stride` floats from head to head.
        static void pack(const float* weights, int stride, int num_heads, BFloat* to) {
            for (int h = 0; h < kHeads; ++h, to += 2 * kTileDepth) {
                BitLanes weight[2] = {};
                if (h < num_heads) {
                    const float* row = weights + (int64_t)h * stride;
                    widen(to_bfloat16(load_lanes(row), load_lanes(row + kLanes)), weight);
                }
                for (int i = 0; i < 2; ++i) {
                    BFloat* rows = to + i * 2 * kHeads * kTileDepth;
                    store_pairs(rows, weight[i]);
                    store_pairs(rows + kTileDepth, weight[i] << 16);
                }
            }
        }

        void clear() {
            Registers::template zero<0>();
            Registers::template zero<1>();
        }
        // rows: (kKeys, kValues).
        void add(const BFloat* rows, const BFloat* weights) {
            using R = Registers;
            constexpr int64_t kRowBytes = sizeof(BFloat) * kValues, kWeightBytes = sizeof(BFloat) * kTileDepth;
            const BFloat* lower = rows + kTileRows * kValues;
            R::template load<2>(weights, kWeightBytes);
            R::template load<4>(rows, kRowBytes);
            R::template dot<0, 2, 4>();
            R::template load<5>(rows + kTileDepth, kRowBytes);
            R::template dot<1, 2, 5>();
            R::template load<3>(weights + 2 * kHeads * kTileDepth, kWeightBytes);
            R::template load<6>(lower, kRowBytes);
            R::template dot<0, 3, 6>();
            R::template load<7>(lower + kTileDepth, kRowBytes);
            R::template dot<1, 3, 7>();
        }
        // The same of rows wherever they lie: row(t, half) is channels 32 half .. 32 half + 32 of one. An infinity, or what is
        // not a number, leaves no number in the channel beside it, whose zero in A it is multiplied with.
        template <typename Row>
        void add_rows(Row row, int num_halves, const BFloat* weights) {
            alignas(64) BFloat rows[kKeys * kValues];
            for (int half = 0; half < num_halves; ++half)
                copy_rows([&](int t) { return row(t, half); }, rows + half * kTileDepth, kValues);
            add(rows, weights);
        }
        // out[h][c] += sums, of the first `size` of kValues channels.
        void add_to(float* out, int stride, int num_heads, int size) const {
            alignas(64) float sums[2][2 * kHeads][kLanes];
            Registers::template store<0>(sums[0], sizeof(Lanes));
            Registers::template store<1>(sums[1], sizeof(Lanes));
            for (int h = 0; h < num_heads; ++h) {
                float* to = out + (int64_t)h * stride;
                for (int c = 0; c < size; c += kTileDepth, to += kTileDepth) {
                    const auto& rows = sums[c / kTileDepth];
                    Lanes low, high;
                    interleave(load_lanes(rows[2 * h]), load_lanes(rows[2 * h + 1]), low, high);
                    store_lanes(to, load_lanes(to) + low);
                    // Heads have channels in whole times 16.
                    if (c + kLanes < size) store_lanes(to + kLanes, load_lanes(to + kLanes) + high);
                }
            }
        }

      private:
        static constexpr TileShapes shapes() {
            TileShapes shapes = TileShapes::whole();
            for (int tile = 0; tile < 4; ++tile) shapes.rows[tile] = 2 * kHeads;
            return shapes;
        }
        Scope scope_{shapes()};
    };

  private:
    // Of kKeys rows, 32 channels of each, `stride` elements from row to row. Tile by tile: so many loads and stores
    // compilers write one after the other.
    template <typename Row>
    static void copy_rows(Row row, BFloat* to, int stride) {
        for (int first = 0; first < kKeys; first += kTileRows)
            for (int t = first; t < first + kTileRows; ++t) store_pairs(to + t * stride, row(t));
    }
};

}  // namespace antkv
