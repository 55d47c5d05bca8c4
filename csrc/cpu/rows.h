// Rows in float32, row by row: decoded from codes, rotated, multiplied with queries.
#pragma once

#include <algorithm>

#include "pages.h"

namespace antkv {

// The code of sub-vector `s` in a row of packed codes; 12-bit codes lie two in three bytes.
template <bool kTwelveBits>
inline int code_at(const uint8_t* codes, int s) {
    if (!kTwelveBits) return codes[s];
    const uint8_t* pair = codes + s / 2 * 3;
    return s % 2 ? (pair[1] >> 4) | (pair[2] << 4) : pair[0] | ((pair[1] & 0xF) << 8);
}

template <int kSize, bool kTwelveBits>
void decode_rows(const uint8_t* codes, int code_bytes, const uint16_t* centroids, int num_sub_vectors, int num_centroids,
                 int count, float* rows) {
    for (int t = 0; t < count; ++t, codes += code_bytes) {
        const uint16_t* table = centroids;
        for (int s = 0; s < num_sub_vectors; ++s, rows += kSize, table += (int64_t)num_centroids * kSize)
            store<kSize>(rows, load_half<kSize>(table + code_at<kTwelveBits>(codes, s) * kSize));
    }
}

// The centroids of one head.
inline const uint16_t* centroids_of(const antkv_layer& layer, int head, bool of_values) {
    const uint16_t* centroids = of_values ? layer.v_centroids : layer.k_centroids;
    return centroids + (int64_t)head * layer.num_centroids * layer.head_size;
}

// Rows (count, head_size) that the codes of `count` tokens stand for; K before RoPE.
inline void decode_rows(const antkv_layer& layer, int head, bool of_values, const uint8_t* codes, int count,
                        float* rows) {
    const auto run = [&](auto kernel) {
        kernel(codes, layer.code_bytes, centroids_of(layer, head, of_values), layer.head_size / layer.sub_vector_size,
               layer.num_centroids, count, rows);
    };
    switch (layer.sub_vector_size) {
        case 2: return run(decode_rows<2, false>);
        case 4: return run(decode_rows<4, false>);
        case 8: return run(decode_rows<8, false>);
        case 16: return run(decode_rows<16, true>);
        default: return run(decode_rows<32, true>);
    }
}

// Turn a row by the angles whose cosines and sines are given; `sign` -1 turns back.
inline void rotate(const antkv_layer& layer, float* __restrict row, const float* __restrict cos,
                   const float* __restrict sin, float sign) {
    const int half = layer.rotary_dim / 2;
    if (layer.is_neox_style) {
        for (int c = 0; c < half; ++c) {
            const float a = row[c], b = row[c + half], s = sign * sin[c];
            row[c] = a * cos[c] - b * s;
            row[c + half] = b * cos[c] + a * s;
        }
    } else {
        for (int c = 0; c < half; ++c) {
            const float a = row[2 * c], b = row[2 * c + 1], s = sign * sin[c];
            row[2 * c] = a * cos[c] - b * s;
            row[2 * c + 1] = b * cos[c] + a * s;
        }
    }
}

// Cosines and sines of a position. Angles are linear in the position, so those of a token are those of the first token of
// a tile plus those of its offset: a table of few rows stays in cache, one of the whole context does not.
struct Angles {
    const float *cos, *sin;

    Angles(const antkv_layer& layer, int position)
        : cos(layer.cos + (int64_t)position * (layer.rotary_dim / 2)),
          sin(layer.sin + (int64_t)position * (layer.rotary_dim / 2)) {}
};

// Turn a query back by the position of a tile's first token: what `offset_keys` of the tile must be multiplied with.
inline void turn_back(const antkv_layer& layer, int position, float* query) {
    if (!layer.cos) return;
    const Angles base(layer, position);
    rotate(layer, query, base.cos, base.sin, -1);
    if (layer.rotary_magnitude == 1) return;
    for (int c = 0; c < layer.rotary_dim; ++c) query[c] /= layer.rotary_magnitude;
}

// `decode_rows` of K and `rotate` in one pass, where channel c turns with c + rotary_dim / 2 and sub-vectors fill a half.
template <int kSize, bool kTwelveBits>
void decode_turned(const antkv_layer& layer, const uint16_t* centroids, const uint8_t* codes, int count, float* rows) {
    const int half = layer.rotary_dim / 2, pairs = half / kSize, num_sub_vectors = layer.head_size / kSize;
    const int64_t table = (int64_t)layer.num_centroids * kSize;
    for (int t = 0; t < count; ++t, codes += layer.code_bytes, rows += layer.head_size) {
        const Angles angles(layer, t);
        for (int s = 0; s < pairs; ++s) {
            const auto centroid = [&](int s) {
                return load_half<kSize>(centroids + s * table + code_at<kTwelveBits>(codes, s) * kSize);
            };
            const auto a = centroid(s), b = centroid(s + pairs);
            const auto cos = load<kSize>(angles.cos + s * kSize), sin = load<kSize>(angles.sin + s * kSize);
            store<kSize>(rows + s * kSize, a * cos - b * sin);
            store<kSize>(rows + half + s * kSize, b * cos + a * sin);
        }
        for (int s = 2 * pairs; s < num_sub_vectors; ++s)
            store<kSize>(rows + s * kSize,
                         load_half<kSize>(centroids + s * table + code_at<kTwelveBits>(codes, s) * kSize));
    }
}

// Decoded K rows of `count` tokens of a tile, turned by their offsets in the tile alone.
inline void offset_keys(const antkv_layer& layer, int head, const uint8_t* codes, int count, float* rows) {
    if (layer.cos && layer.is_neox_style && layer.rotary_dim / 2 % layer.sub_vector_size == 0) {
        const auto run = [&](auto kernel) {
            kernel(layer, centroids_of(layer, head, false), codes, count, rows);
        };
        switch (layer.sub_vector_size) {
            case 2: return run(decode_turned<2, false>);
            case 4: return run(decode_turned<4, false>);
            case 8: return run(decode_turned<8, false>);
            case 16: return run(decode_turned<16, true>);
            default: return run(decode_turned<32, true>);
        }
    }
    decode_rows(layer, head, false, codes, count, rows);
    if (!layer.cos) return;
    for (int t = 0; t < count; ++t) {
        const Angles angles(layer, t);
        rotate(layer, rows + (int64_t)t * layer.head_size, angles.cos, angles.sin, 1);
    }
}

// Decoded K rows of `count` tokens from `position` on as attention uses them, turned by their positions.
inline void turned_keys(const antkv_layer& layer, int head, const uint8_t* codes, int position, int count, float* rows) {
    offset_keys(layer, head, codes, count, rows);
    if (!layer.cos || position == 0) return;
    const Angles base(layer, position);
    for (int t = 0; t < count; ++t) {
        float* row = rows + (int64_t)t * layer.head_size;
        rotate(layer, row, base.cos, base.sin, 1);
        if (layer.rotary_magnitude == 1) continue;
        for (int c = 0; c < layer.rotary_dim; ++c) row[c] /= layer.rotary_magnitude;
    }
}

// out[h][t] = queries[h] . rows[t] for kHeads queries; count is rounded up to W, out has room for it.
template <int kHeads>
void dot_rows(const float* queries, const float* rows, int size, int count, float* out, int out_stride) {
    constexpr int kTokens = kHeads <= 2 ? 4 : kHeads <= 4 ? 4 : 2;
    Vec partial[kHeads][W];
    for (int first = 0; first < count; first += W) {
        for (int t = 0; t < W; t += kTokens) {
            // Rows past the end are not read; what stands in their place is never used.
            const float* token[kTokens];
            for (int u = 0; u < kTokens; ++u) token[u] = rows + (int64_t)std::min(first + t + u, count - 1) * size;
            Vec total[kTokens][kHeads] = {};
            for (int c = 0; c < size; c += W) {
                Vec key[kTokens];
                for (int u = 0; u < kTokens; ++u) key[u] = load(token[u] + c);
                for (int h = 0; h < kHeads; ++h) {
                    const Vec query = load(queries + h * size + c);
                    for (int u = 0; u < kTokens; ++u) total[u][h] += query * key[u];
                }
            }
            for (int u = 0; u < kTokens; ++u)
                for (int h = 0; h < kHeads; ++h) partial[h][t + u] = total[u][h];
        }
        for (int h = 0; h < kHeads; ++h) store(out + h * out_stride + first, sums(partial[h]));
    }
}

// out[h] += sum over t of weights[h][t] rows[t] for kHeads heads.
template <int kHeads>
void add_rows(const float* weights, int weight_stride, const float* rows, int size, int count, float* out) {
    constexpr int kVectors = kHeads <= 2 ? 4 : 2;
    for (int c = 0; c < size; c += W * kVectors) {
        const int vectors = std::min(kVectors, (size - c) / W);
        Vec total[kHeads][kVectors];
        for (int h = 0; h < kHeads; ++h)
            for (int v = 0; v < vectors; ++v) total[h][v] = load(out + h * size + c + v * W);
        if (vectors == kVectors) {
            for (int t = 0; t < count; ++t) {
                Vec row[kVectors];
                for (int v = 0; v < kVectors; ++v) row[v] = load(rows + (int64_t)t * size + c + v * W);
                for (int h = 0; h < kHeads; ++h) {
                    const Vec weight = broadcast(weights[h * weight_stride + t]);
                    for (int v = 0; v < kVectors; ++v) total[h][v] += weight * row[v];
                }
            }
        } else {
            for (int t = 0; t < count; ++t)
                for (int h = 0; h < kHeads; ++h)
                    for (int v = 0; v < vectors; ++v)
                        total[h][v] += weights[h * weight_stride + t] * load(rows + (int64_t)t * size + c + v * W);
        }
        for (int h = 0; h < kHeads; ++h)
            for (int v = 0; v < vectors; ++v) store(out + h * size + c + v * W, total[h][v]);
    }
}

// Call `kernel(std::integral_constant<int, n>, first)` for runs of n heads that together are `num_heads`.
template <typename Kernel>
void for_heads(int num_heads, Kernel kernel) {
    for (int h = 0; h < num_heads;) {
        switch (std::min(num_heads - h, 8)) {
            case 8: kernel(std::integral_constant<int, 8>{}, h); h += 8; break;
            case 7: kernel(std::integral_constant<int, 7>{}, h); h += 7; break;
            case 6: kernel(std::integral_constant<int, 6>{}, h); h += 6; break;
            case 5: kernel(std::integral_constant<int, 5>{}, h); h += 5; break;
            case 4: kernel(std::integral_constant<int, 4>{}, h); h += 4; break;
            case 3: kernel(std::integral_constant<int, 3>{}, h); h += 3; break;
            case 2: kernel(std::integral_constant<int, 2>{}, h); h += 2; break;
            default: kernel(std::integral_constant<int, 1>{}, h); h += 1;
        }
    }
}

inline void dot_rows(int num_heads, const float* queries, const float* rows, int size, int count, float* out,
                     int out_stride) {
    for_heads(num_heads, [&](auto heads, int h) {
        dot_rows<heads>(queries + (int64_t)h * size, rows, size, count, out + (int64_t)h * out_stride, out_stride);
    });
}

inline void add_rows(int num_heads, const float* weights, int weight_stride, const float* rows, int size, int count,
                     float* out) {
    for_heads(num_heads, [&](auto heads, int h) {
        add_rows<heads>(weights + (int64_t)h * weight_stride, weight_stride, rows, size, count, out + (int64_t)h * size);
    });
}

}  // namespace antkv
