// Logits of a few queries to coded keys by VDPBF16PS: keys are decoded, turned and multiplied without leaving registers.
#pragma once

#include "code_offsets.h"
#include "tile_logits.h"

#if defined(__AVX512BF16__)

namespace antkv {

// As `TileLogits`, for at most four heads, all of whose channels turn in halves.
template <int kHeads>
class FusedLogits {
  public:
    static bool fits(const antkv_layer& layer) {
        return TileLogitsFit(layer) && layer.cos && layer.is_neox_style && layer.rotary_dim == layer.head_size;
    }

    FusedLogits(const antkv_layer& layer, const float* queries, int num_heads)
        : layer_(layer), queries_(queries), num_heads_(num_heads) {}

    template <typename Table, typename Codes, typename IsCoded>
    void run(Table centroids, int begin, int count, Codes codes, IsCoded is_coded, float* logits, int stride) {
        if (layer_.head_size == 128) run<128>(centroids, begin, count, codes, is_coded, logits, stride);
        else run<0>(centroids, begin, count, codes, is_coded, logits, stride);
    }

  private:
    static constexpr int kMaxHead = 256;

    // kHeadSize is not 0 where the compiler knows it.
    template <int kHeadSize, typename Table, typename Codes, typename IsCoded>
    void run(Table centroids, int begin, int count, Codes codes, IsCoded is_coded, float* logits, int stride) {
        CodeOffsets<Table, kKeys> offsets(centroids, layer_.head_size);
        for (int first = 0; first < count; first += kKeys) {
            if (!is_coded(first)) continue;
            turn_queries(begin + first);
            offsets.set(codes(first), layer_.code_bytes);
            for (int t = 0; t < kKeys; t += 4) {
                __m512 totals[4][kHeads];
                add<kHeadSize>(offsets, t, totals[0], totals[1]);
                add<kHeadSize>(offsets, t + 2, totals[2], totals[3]);
                __m512 heads[4] = {};
                for (int h = 0; h < kHeads; ++h) heads[h] = quarters(totals[0][h], totals[1][h], totals[2][h], totals[3][h]);
                // A head in every quarter, a token in every lane.
                const __m512 sums = kHeads == 1 ? sum_of_quarters(heads[0]) : sums_of_quarters(heads);
                const __m128 parts[4] = {_mm512_castps512_ps128(sums), _mm512_extractf32x4_ps(sums, 1),
                                         _mm512_extractf32x4_ps(sums, 2), _mm512_extractf32x4_ps(sums, 3)};
                for (int h = 0; h < kHeads; ++h)
                    if (h < num_heads_) _mm_storeu_ps(logits + (int64_t)h * stride + first + t, parts[h]);
            }
        }
    }

    // Sums of 16 parts of the products of all heads with tokens t and t + 1.
    template <int kHeadSize, typename Offsets>
    void add(const Offsets& offsets, int t, __m512 (&first)[kHeads], __m512 (&second)[kHeads]) const {
        const int half = (kHeadSize ? kHeadSize : layer_.head_size) / 2;
        for (int h = 0; h < kHeads; ++h) first[h] = second[h] = _mm512_setzero_ps();
        const float *cos = layer_.cos + (int64_t)t * half, *sin = layer_.sin + (int64_t)t * half;
        const uint32_t *row = offsets.row(t), *next_row = offsets.row(t + 1);
#pragma GCC unroll 4
        for (int c = 0; c < half; c += kLanes) {
            const __m512bh key = turned(offsets, row, c, half, cos, sin);
            const __m512bh next = turned(offsets, next_row, c, half, cos + half, sin + half);
            for (int h = 0; h < kHeads; ++h) {
                const __m512bh query = (__m512bh)_mm512_load_si512(turned_[c / kLanes][h]);
                first[h] = _mm512_dpbf16_ps(first[h], key, query);
                second[h] = _mm512_dpbf16_ps(second[h], next, query);
            }
        }
    }
    template <typename Offsets>
    static __m512bh turned(const Offsets& offsets, const uint32_t* row, int c, int half, const float* cos, const float* sin) {
        const Lanes a = (Lanes)_mm512_cvtph_ps(offsets.sixteen(row, c));
        const Lanes b = (Lanes)_mm512_cvtph_ps(offsets.sixteen(row, c + half));
        Lanes cosine = load_lanes(cos + c), sine = load_lanes(sin + c);
        // Once: the compiler would load them with every product.
        asm("" : "+v"(cosine), "+v"(sine));
        return (__m512bh)to_bfloat16(a * cosine - b * sine, b * cosine + a * sine);
    }

    // In every quarter, lane i is the sum of the lanes of that quarter of vector i.
    static __m512 quarters(__m512 a, __m512 b, __m512 c, __m512 d) {
        const auto pair = [](__m512 x, __m512 y) { return _mm512_unpacklo_ps(x, y) + _mm512_unpackhi_ps(x, y); };
        const __m512d low = (__m512d)pair(a, b), high = (__m512d)pair(c, d);
        return (__m512)_mm512_unpacklo_pd(low, high) + (__m512)_mm512_unpackhi_pd(low, high);
    }
    // Quarter i is the sum of the quarters of vectors[i].
    static __m512 sums_of_quarters(const __m512 (&vectors)[4]) {
        const auto pair = [](__m512 x, __m512 y) {
            return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xDD);
        };
        return pair(pair(vectors[0], vectors[1]), pair(vectors[2], vectors[3]));
    }
    static __m512 sum_of_quarters(__m512 x) {
        x += _mm512_shuffle_f32x4(x, x, 0x4E);
        return x + _mm512_shuffle_f32x4(x, x, 0xB1);
    }

    // Turns the queries back by a position, a multiple of kKeys.
    void turn_queries(int position) {
        const int half = layer_.head_size / 2;
        const Angles block(layer_, position / kBlockSize * kBlockSize), rest(layer_, position % kBlockSize);
        const float scale = 1 / (layer_.rotary_magnitude * layer_.rotary_magnitude);
        for (int c = 0; c < half; c += kLanes) {
            const Lanes cos0 = load_lanes(block.cos + c) * scale, sin0 = load_lanes(block.sin + c) * scale;
            const Lanes cos1 = load_lanes(rest.cos + c), sin1 = load_lanes(rest.sin + c);
            const Lanes cos = cos0 * cos1 - sin0 * sin1, sin = sin0 * cos1 + cos0 * sin1;
            for (int h = 0; h < num_heads_; ++h) {
                const float* query = queries_ + h * layer_.head_size + c;
                const Lanes a = load_lanes(query), b = load_lanes(query + half);
                store_pairs(turned_[c / kLanes][h], to_bfloat16(a * cos + b * sin, b * cos - a * sin));
            }
        }
    }

    const antkv_layer& layer_;
    const float* queries_;
    const int num_heads_;
    alignas(64) BFloat turned_[kMaxHead / kTileDepth][kHeads][kTileDepth] = {};
};

}  // namespace antkv

#endif
