// Products of rows in float32 with queries and with weights.
#pragma once

#include "heads.h"
#include "simd.h"

namespace antkv {

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
