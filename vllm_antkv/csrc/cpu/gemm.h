// Matrix products of the few shapes that attention needs, in registers.
#pragma once

#include <algorithm>

#include "simd.h"

namespace antkv {

constexpr int kGemmRows = 6;
constexpr int kGemmVectors = W == 16 ? 4 : 2;

// C[m][n] (+)= sum over k of A[m][k] B[k][n], for kRows rows and kVectors * W columns.
template <int kRows, int kVectors, bool kAdd>
inline void gemm_panel(int inner, const float* a, int a_stride, const float* b, int b_stride, float* c, int c_stride) {
    Vec total[kRows][kVectors] = {};
    for (int k = 0; k < inner; ++k) {
        Vec row[kVectors];
        for (int v = 0; v < kVectors; ++v) row[v] = load(b + (int64_t)k * b_stride + v * W);
        for (int m = 0; m < kRows; ++m) {
            const Vec factor = broadcast(a[(int64_t)m * a_stride + k]);
            for (int v = 0; v < kVectors; ++v) total[m][v] += factor * row[v];
        }
    }
    for (int m = 0; m < kRows; ++m) {
        for (int v = 0; v < kVectors; ++v) {
            float* to = c + (int64_t)m * c_stride + v * W;
            store(to, kAdd ? load(to) + total[m][v] : total[m][v]);
        }
    }
}

template <int kVectors, bool kAdd>
void gemm_columns(int rows, int inner, const float* a, int a_stride, const float* b, int b_stride, float* c,
                  int c_stride) {
    int m = 0;
    for (; m + kGemmRows <= rows; m += kGemmRows)
        gemm_panel<kGemmRows, kVectors, kAdd>(inner, a + (int64_t)m * a_stride, a_stride, b, b_stride,
                                              c + (int64_t)m * c_stride, c_stride);
    for (; m < rows; ++m)
        gemm_panel<1, kVectors, kAdd>(inner, a + (int64_t)m * a_stride, a_stride, b, b_stride,
                                      c + (int64_t)m * c_stride, c_stride);
}

// C (rows, columns) (+)= A (rows, inner) B (inner, columns); columns is a multiple of W.
template <bool kAdd>
void gemm(int rows, int columns, int inner, const float* a, int a_stride, const float* b, int b_stride, float* c,
          int c_stride) {
    int n = 0;
    for (; n + kGemmVectors * W <= columns; n += kGemmVectors * W)
        gemm_columns<kGemmVectors, kAdd>(rows, inner, a, a_stride, b + n, b_stride, c + n, c_stride);
    for (; n < columns; n += W) gemm_columns<1, kAdd>(rows, inner, a, a_stride, b + n, b_stride, c + n, c_stride);
}

// to (columns, to_stride) from `from` (rows, columns).
inline void transpose(int rows, int columns, const float* from, float* to, int to_stride) {
    constexpr int kBlock = 16;
    for (int r0 = 0; r0 < rows; r0 += kBlock)
        for (int c0 = 0; c0 < columns; c0 += kBlock)
            for (int r = r0; r < std::min(r0 + kBlock, rows); ++r)
                for (int c = c0; c < std::min(c0 + kBlock, columns); ++c)
                    to[(int64_t)c * to_stride + r] = from[(int64_t)r * columns + c];
}

}  // namespace antkv
