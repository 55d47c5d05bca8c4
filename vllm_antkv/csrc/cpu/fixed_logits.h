// Logits of single queries to coded keys in whole numbers of 16 bits: decode where tile registers would not be faster.
#pragma once

#include "codes.h"
#include "fixed.h"
#include "tiles/lanes.h"

namespace antkv {

// Whether `FixedLogits` can do a layer: its codebook has fixed numbers, and channels that rotate together fill vectors.
inline bool fixed_logits_fit(const antkv_layer& layer) {
    const int rotating = layer.cos ? layer.rotary_dim : 0;
    return layer.k_fixed && rotating % (layer.is_neox_style ? 2 * kFixed : kFixed) == 0 && layer.head_size % kFixed == 0;
}

// Logits of up to 4 kSets queries to the coded keys of a split.
//
// Centroids are shares of the largest that a pair of channels that rotate together has (vllm_antkv/ops/fixed_point.py): to
// 2^-15 of it, where bfloat16 keeps 2^-9 of the number itself. Keys are rotated by their offset in a run of 64 tokens, two
// products of 16 bits for what takes four in float32 and a rounding. Queries, rotated back by the run's position, take as
// much of 16 bits as leaves the sum room in 32.
//
// Where kHeadSize is not 0, heads have that many channels, halves of which rotate together: vectors then stay in registers.
template <int kSets, int kHeadSize>
class FixedLogits {
  public:
    // queries: (num_heads, head_size) in the order of codes.
    FixedLogits(const antkv_layer& layer, int head, const float* queries, int num_heads)
        : layer_(layer), size_(layer.head_size), num_heads_(num_heads) {
        std::copy_n(queries, num_heads * size_, rotated_);
        for (int h = 0; h < num_heads; ++h) scale(layer.k_units + (int64_t)head * size_, h);
    }

    // logits[h][t] = product of query h and token t, whose K rotates by position + t. codes(t): codes of kTokens tokens from
    // t on; is_coded(t): whether any of them is asked for.
    template <typename Table, typename Codes, typename IsCoded>
    void run(Table centroids, int position, int count, Codes codes, IsCoded is_coded, float* logits, int stride) {
        for (int first = 0; first < count; first += kTokens) {
            if (first % kRun == 0) rotate_queries(first == 0 ? position : kRun);
            if (!is_coded(first)) continue;
            const uint8_t* from = codes(first);
            for (int t = 0; t < kTokens; t += kLanes)
                multiply(centroids, from + (int64_t)t * layer_.code_bytes, (first + t) % kRun, logits + first + t, stride);
        }
    }

  private:
    static constexpr int kTokens = 32, kRun = 64, kHeads = 4 * kSets;
    static constexpr int kTogether = W / 4;  // tokens whose products fill a vector
    static constexpr int kVectors = (kHeadSize ? kHeadSize : kMaxHeadSize) / kFixed;

    int rotating() const { return kHeadSize ? kHeadSize : layer_.cos ? layer_.rotary_dim : 0; }
    int num_vectors() const { return kHeadSize ? kVectors : size_ / kFixed; }

    // A query in units of centroids, as large as may be: rotating back makes numbers larger by 2^1/2 at most, and with keys of
    // 32,001 sums stay below 2^31.
    void scale(const float* units, int h) {
        constexpr float kLargest = 23000, kSum = 47000;
        float* query = rotated_ + h * size_;
        Vec tops = {}, totals = {};
        for (int c = 0; c < size_; c += W) {
            const Vec scaled = load(query + c) * load(units + c), sizes = maximum(scaled, -scaled);
            store(query + c, scaled);
            tops = maximum(tops, sizes);
            totals += sizes;
        }
        const float factor = std::min(kLargest / (largest(tops) + 0x1p-100f), kSum / (sum(totals) + 0x1p-100f));
        for (int c = 0; c < size_; ++c) query[c] *= factor;
        factor_[h] = 1 / factor;
    }

    // Turns queries back by so many positions more, and rounds them.
    void rotate_queries(int positions) {
        if (kHeadSize) {
            rotate_whole_heads(Angles(layer_, positions));
        } else {
            for (int h = 0; h < num_heads_; ++h) rotate_back(layer_, positions, rotated_ + h * size_);
        }
        const int size = kHeadSize ? kHeadSize : size_;
        for (int h = 0; h < num_heads_; ++h) {
            for (int c = 0; c < size; c += W) {
                const HalfVec whole = __builtin_convertvector(to_whole(load(rotated_ + h * size + c)), HalfVec);
                std::memcpy(&queries_[h][c], &whole, sizeof whole);
            }
        }
    }
    // As `rotate_back`, but all queries by angles that are read once.
    void rotate_whole_heads(Angles angles) {
        const float scale = 1 / layer_.rotary_magnitude;
        for (int c = 0; c < kHeadSize / 2; c += W) {
            const Vec cos = load(angles.cos + c) * scale, sin = load(angles.sin + c) * scale;
            for (int h = 0; h < num_heads_; ++h) {
                float* query = rotated_ + h * kHeadSize + c;
                const Vec a = load(query), b = load(query + kHeadSize / 2);
                store(query, a * cos + b * sin);
                store(query + kHeadSize / 2, b * cos - a * sin);
            }
        }
    }

    // Of 16 tokens, the first of them `offset` tokens into the run.
    template <typename Table>
    void multiply(Table centroids, const uint8_t* codes, int offset, float* logits, int stride) const {
        Fixed queries[kHeads][kVectors];
        for (int h = 0; h < kHeads; ++h)
            for (int v = 0; v < num_vectors(); ++v) queries[h][v] = load_fixed(&queries_[h][v * kFixed]);
        alignas(64) float products[kSets][4 * kLanes];  // four heads side by side
        for (int first = 0; first < kLanes; first += kTogether) {
            Fixed parts[kSets][kTogether];
            for (int i = 0; i < kTogether; ++i) {
                Fixed key[kVectors];
                rotated_key(centroids, codes + (int64_t)(first + i) * layer_.code_bytes, offset + first + i, key);
                for (int set = 0; set < kSets; ++set) {
                    Fixed totals[4] = {};
                    for (int h = 0; h < 4; ++h)
                        for (int v = 0; v < num_vectors(); ++v)
                            totals[h] = add_products(totals[h], queries[4 * set + h][v], key[v]);
                    parts[set][i] = sums_of_quarters(totals);
                }
            }
            for (int set = 0; set < kSets; ++set) store(products[set] + 4 * first, sum_quarters(parts[set]));
        }
        for (int set = 0; set < kSets; ++set) {
            Lanes rows[4];
            for (int i = 0; i < 4; ++i) rows[i] = load_lanes(products[set] + i * kLanes);
            deinterleave<4>(rows);
            for (int i = 0, h = 4 * set; i < 4 && h < num_heads_; ++i, ++h)
                store_lanes(logits + (int64_t)h * stride, rows[i] * factor_[h]);
        }
    }

    // The vectors of a key in the order of channels.
    template <typename Table>
    ANTKV_INLINE void rotated_key(Table centroids, const uint8_t* codes, int offset, Fixed* key) const {
        const int size = rotating();
        const bool in_halves = kHeadSize || layer_.is_neox_style;
        const int16_t* cos = layer_.fixed_angles + (int64_t)offset * (in_halves ? size : 2 * size);
        const int16_t* sin = cos + (in_halves ? size / 2 : size);
        int c = 0;
        if (in_halves) {
            for (; c < size / 2; c += kFixed) {
                const Fixed a = channels(centroids, codes, c), b = channels(centroids, codes, c + size / 2);
                const Fixed cosine = load_fixed(cos + c), sine = load_fixed(sin + c);
                key[c / kFixed] = subtract(share(a, cosine), share(b, sine));
                key[(c + size / 2) / kFixed] = add(share(b, cosine), share(a, sine));
            }
            c = size;
        } else {
            for (; c < size; c += kFixed) {
                const Fixed x = channels(centroids, codes, c);
                key[c / kFixed] = add(share(x, load_fixed(cos + c)), share(swap_neighbours(x), load_fixed(sin + c)));
            }
        }
        for (; c < (kHeadSize ? kHeadSize : size_); c += kFixed) key[c / kFixed] = channels(centroids, codes, c);
    }
    template <typename Table>
    ANTKV_INLINE static Fixed channels(Table centroids, const uint8_t* codes, unsigned c) {
#if defined(__AVX512BW__)
        return _mm512_inserti64x4(_mm512_castsi256_si512(centroids.sixteen(codes, c)), centroids.sixteen(codes, c + 16), 1);
#else
        return centroids.sixteen(codes, c);
#endif
    }

    const antkv_layer& layer_;
    const int size_, num_heads_;
    float factor_[kHeads];  // of a product of whole numbers
    alignas(64) float rotated_[kHeads * kMaxHeadSize];
    alignas(64) int16_t queries_[kHeads][kMaxHeadSize] = {};
};

}  // namespace antkv
