// Weighted sums of decoded V rows without decoding them: weights are added up per code, and every centroid is multiplied
// once with what its code has collected. Pays where there are more tokens than centroids.
#pragma once

#include "codes.h"

namespace antkv {

constexpr int kTogether = 4;  // neighbouring sub-vectors whose bins are filled in one pass over the codes

// bins[s][code][lane] of `kCount` neighbouring sub-vectors += weights[t][lane], over tokens of a VQ page.
template <int kLanes, int kCount>
void add_to_bins(const uint8_t* codes, int code_bytes, const float* weights, int count, float* bins) {
    for (int t = 0; t < count; ++t, codes += code_bytes) {
        const auto weight = load<kLanes>(weights + t * kLanes);
        for (int s = 0; s < kCount; ++s) {
            float* at = bins + (256 * s + codes[s]) * kLanes;
            store<kLanes>(at, load<kLanes>(at) + weight);
        }
    }
}

// out[h][k] += sum over codes of bins[code][h] centroid[code][k], for kSize channels of a sub-vector.
//
// stride: channels from one centroid to the next.
template <int kLanes, int kSize>
void add_centroids(const float* bins, const uint16_t* centroids, int stride, int num_heads, float* out, int out_stride) {
    using Sum = typename Floats<kSize>::Type;
    Sum even[kLanes] = {}, odd[kLanes] = {};
    const auto add = [&](int code, Sum* total) {
        const Sum centroid = load_half<kSize>(centroids + code * stride);
        for (int h = 0; h < kLanes; ++h) total[h] += centroid * bins[code * kLanes + h];
    };
    for (int code = 0; code < 256; code += 2) {
        add(code, even);
        add(code + 1, odd);
    }
    for (int h = 0; h < num_heads; ++h) {
        float* to = out + h * out_stride;
        store<kSize>(to, load<kSize>(to) + even[h] + odd[h]);
    }
}

// out[h] += sum over tokens of weights[token][h] row[token] for up to kLanes heads; 8-bit codes.
//
// codes(block): the V codes of the block's tokens. weights: (blocks * 128, kLanes).
template <int kLanes, typename Table, typename Codes>
void add_by_histogram(const antkv_layer& layer, Table centroids, Codes codes, int num_tokens, const float* weights,
                 int num_heads, float* out) {
    constexpr int kSize = Table::kChannels;
    const int num_sub_vectors = layer.head_size / kSize;
    for (int s = 0; s < num_sub_vectors; s += kTogether) {
        const int together = std::min(kTogether, num_sub_vectors - s);
        alignas(64) float bins[kTogether * 256 * kLanes] = {};
        for (int first = 0; first < num_tokens; first += kBlockSize) {
            const int count = std::min(kBlockSize, num_tokens - first);
            const uint8_t* from = codes(first / kBlockSize) + s;
            const float* added = weights + first * kLanes;
            switch (together) {
                case 4: add_to_bins<kLanes, 4>(from, layer.code_bytes, added, count, bins); break;
                case 3: add_to_bins<kLanes, 3>(from, layer.code_bytes, added, count, bins); break;
                case 2: add_to_bins<kLanes, 2>(from, layer.code_bytes, added, count, bins); break;
                default: add_to_bins<kLanes, 1>(from, layer.code_bytes, added, count, bins);
            }
        }
        constexpr int kPart = std::min(kSize, 8);
        for (int i = 0; i < together; ++i)
            for (int k = 0; k < kSize; k += kPart)
                add_centroids<kLanes, kPart>(bins + 256 * i * kLanes, centroids.data + (s + i) * Table::kTable + k, kSize,
                                             num_heads, out + (s + i) * kSize + k, layer.head_size);
    }
}

}  // namespace antkv
