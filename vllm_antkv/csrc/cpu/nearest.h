// Nearest centroids in float32.
#pragma once

#include "simd.h"

namespace antkv {

constexpr int kRun = 8;  // points compared together, so that a centroid is loaded once for all of them

// Centroids of one problem: (size, count) elements, and their squared norms / 2, (count); count is a multiple of W.
template <typename Element>
struct Columns {
    const typename Element::Storage* centroids;
    const float* half_norms;
    int size, count;
};

// Nearest centroids of points, (size, kRun); equal distances take the lower index. kVectors vectors of centroids are
// compared at a time, so that a product need not wait for the one before where there are few points. A distance is
// |c|^2 / 2 - c.x.
template <typename Element, int kPoints, int kVectors>
inline void nearest(const Columns<Element>& columns, const float* points, int* codes, float* distances) {
    Vec best[kPoints], best_code[kPoints] = {}, code;  // codes are whole numbers
    for (int t = 0; t < kPoints; ++t) best[t] = broadcast(kInfinity);
    for (int lane = 0; lane < W; ++lane) code[lane] = lane;
    for (int c = 0; c < columns.count; c += kVectors * W) {
        Vec distance[kPoints][kVectors];
        for (int v = 0; v < kVectors; ++v)
            for (int t = 0; t < kPoints; ++t) distance[t][v] = load(columns.half_norms + c + v * W);
        for (int k = 0; k < columns.size; ++k) {
            for (int v = 0; v < kVectors; ++v) {
                const Vec column = Element::load(columns.centroids + (int64_t)k * columns.count + c + v * W);
                for (int t = 0; t < kPoints; ++t) distance[t][v] -= broadcast(points[k * kRun + t]) * column;
            }
        }
        for (int v = 0; v < kVectors; ++v, code += W) {
            for (int t = 0; t < kPoints; ++t) {
                best_code[t] = distance[t][v] < best[t] ? code : best_code[t];
                best[t] = distance[t][v] < best[t] ? distance[t][v] : best[t];
            }
        }
    }
    for (int t = 0; t < kPoints; ++t) {
        distances[t] = smallest(best[t]);
        codes[t] = (int)smallest(best[t] == distances[t] ? best_code[t] : broadcast(kInfinity));
    }
}

}  // namespace antkv
