// Weighted sums of decoded V rows without decoding them: weights are added up per code, and every centroid is multiplied
// once with what its code has collected. Pays where there are more tokens than centroids.
#pragma once

#include "rows.h"

namespace antkv {

// bins[code][lane] of two neighbouring sub-vectors (or of one) += weights[t][lane], over tokens of a VQ page.
template <int kLanes, int kTogether>
void add_to_bins(const uint8_t* codes, int code_bytes, const float* weights, int count, float* bins) {
    for (int t = 0; t < count; ++t, codes += code_bytes) {
        const auto weight = load<kLanes>(weights + t * kLanes);
        for (int s = 0; s < kTogether; ++s) {
            float* at = bins + (s * 256 + codes[s]) * kLanes;
            store<kLanes>(at, load<kLanes>(at) + weight);
        }
    }
}

// out[h][k] += sum over codes of bins[code][h] centroid[code][k], for one sub-vector.
template <int kLanes, int kSize>
void add_centroids(const float* bins, const uint16_t* centroids, int num_heads, float* out, int out_stride) {
    using Sum = typename Floats<kSize>::Type;
    Sum even[kLanes] = {}, odd[kLanes] = {};
    for (int code = 0; code < 256; code += 2) {
        const auto first = load_half<kSize>(centroids + code * kSize);
        const auto second = load_half<kSize>(centroids + (code + 1) * kSize);
        for (int h = 0; h < kLanes; ++h) {
            even[h] += first * bins[code * kLanes + h];
            odd[h] += second * bins[(code + 1) * kLanes + h];
        }
    }
    for (int h = 0; h < num_heads; ++h) {
        float* to = out + h * out_stride;
        store<kSize>(to, load<kSize>(to) + even[h] + odd[h]);
    }
}

// out[h] += sum over tokens of weights[token][h] row[token] for up to kLanes heads; 8-bit codes.
//
// codes(block): the V codes of the block's tokens. weights: (blocks * 128, kLanes).
template <int kLanes, int kSize, typename Codes>
void add_by_code(const antkv_layer& layer, int head, Codes codes, int num_tokens, const float* weights, int num_heads,
                 float* out) {
    const int num_sub_vectors = layer.head_size / kSize;
    const uint16_t* centroids = centroids_of(layer, head, true);
    for (int s = 0; s < num_sub_vectors; s += 2) {
        const int together = std::min(2, num_sub_vectors - s);
        alignas(64) float bins[2 * 256 * kLanes] = {};
        for (int first = 0; first < num_tokens; first += kBlockSize) {
            const int count = std::min(kBlockSize, num_tokens - first);
            const uint8_t* from = codes(first / kBlockSize) + s;
            if (together == 2)
                add_to_bins<kLanes, 2>(from, layer.code_bytes, weights + first * kLanes, count, bins);
            else
                add_to_bins<kLanes, 1>(from, layer.code_bytes, weights + first * kLanes, count, bins);
        }
        for (int i = 0; i < together; ++i)
            add_centroids<kLanes, kSize>(bins + i * 256 * kLanes, centroids + (int64_t)(s + i) * 256 * kSize, num_heads,
                                         out + (s + i) * kSize, layer.head_size);
    }
}

}  // namespace antkv
