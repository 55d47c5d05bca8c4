// A step of weighted k-means (vllm_antkv/offline/kmeans.py): which centroid each point is nearest to, and what the points
// of a centroid add up to. A problem is one thread's: sums do not depend on how many there are.
#include <algorithm>

#include "antkv.h"
#include "nearest.h"

namespace antkv {
namespace {

constexpr int kMaxSize = 32;

void cluster(const antkv_clusters& all, int64_t problem) {
    const int size = all.size, width = size + 1;
    const float* rows = all.rows + problem * all.rows_stride;
    const float* weights = all.weights + problem * all.weights_stride;
    double* sums = all.sums + problem * all.num_centroids * width;
    const Columns<Float32> columns{all.columns + problem * all.num_centroids * size,
                                   all.half_norms + problem * all.num_centroids, size, all.num_centroids};
    float points[kMaxSize * kRun] = {};
    int codes[kRun];
    for (int64_t first = 0; first < all.num_points; first += kRun) {
        const int count = (int)std::min<int64_t>(kRun, all.num_points - first);
        float distances[kRun];
        for (int t = 0; t < count; ++t)
            for (int k = 0; k < size; ++k) points[k * kRun + t] = rows[(first + t) * width + k];
        nearest<Float32, kRun, 1>(columns, points, codes, distances);
        for (int t = 0; t < count; ++t) {
            const float* row = rows + (first + t) * width;
            double* sum = sums + (int64_t)codes[t] * width;
            const double weight = weights[first + t];
            for (int k = 0; k < width; ++k) sum[k] += weight * row[k];
            all.distances[problem * all.num_points + first + t] = distances[t];
        }
    }
}

}  // namespace
}  // namespace antkv

extern "C" void antkv_cluster(const antkv_clusters* all) noexcept {
#pragma omp parallel for schedule(dynamic)
    for (int64_t problem = 0; problem < all->num_problems; ++problem) antkv::cluster(*all, problem);
}
