// The nearest of 4,096 centroids: bytes rule nearly all of them out, and float32 compares the rest.
//
// Every token is compared with every centroid, and one token alone waits for all of them to come from memory. In bytes they
// are 3 quarters of what float16 takes, read from the first to the last, and 4 of their products are one instruction's.
#pragma once

#include <algorithm>
#include <cmath>

#include "pages.h"
#include "tiles/lanes.h"

namespace antkv {

#if defined(__AVX512VNNI__)
constexpr float kLargestByte = 127;
#else
constexpr float kLargestByte = 63;  // sums of two products then fit 16 bits
#endif

// Lane i: sum + products of bytes 4 i .. 4 i + 4, unsigned, with the four signed ones.
inline IntLanes add_byte_products(IntLanes sum, const uint8_t* from, const int8_t* four) {
    int32_t factors;
    std::memcpy(&factors, four, sizeof factors);
#if defined(__AVX512VNNI__)
    return (IntLanes)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(from), _mm512_set1_epi32(factors));
#elif defined(__AVX512BW__)
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(from), _mm512_set1_epi32(factors));
    return sum + (IntLanes)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    __m256i halves[2];
    for (int i = 0; i < 2; ++i) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i*)from + i), _mm256_set1_epi32(factors));
        halves[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
    IntLanes products;
    std::memcpy(&products, halves, sizeof products);
    return sum + products;
#endif
}

// The centroids of a sub-vector of kSize channels; see vllm_antkv/ops/byte_tables.py.
template <int kSize>
struct ByteTable {
    static constexpr int kCentroids = 4096, kBlock = kLanes * (kSize + 2 * (int)sizeof(float));
    const uint8_t* blocks;      // of 16 centroids: half their squared norms, what their bytes are multiples of, and bytes
    const float* middle;        // (kSize)
    const float* limits;        // largest norm of whole numbers, of what rounding to them took, and of centroids
    const uint16_t* centroids;  // (kCentroids, kSize) float16

    const uint8_t* block(int code) const { return blocks + code / kLanes * kBlock; }
    // Half the squared distance of a sub-vector, less the middle, but for what is the same for all centroids.
    float distance(int code, const float* sub_vector) const {
        float half_norm;
        std::memcpy(&half_norm, block(code) + code % kLanes * sizeof(float), sizeof half_norm);
        Vec products = {};
        for (int k = 0; k < kSize; k += W)
            products += load(sub_vector + k) * (Float16::load(centroids + code * kSize + k) - load(middle + k));
        return half_norm - sum(products);
    }
};

// A sub-vector less the middle, in whole numbers that are multiples of `unit`.
template <int kSize>
struct ByteSubVector {
    alignas(64) float numbers[kSize];
    int8_t bytes[kSize];
    float unit;
    int doubt;  // by how much a product of whole numbers may be off, what float32 loses when it compares included
    int start;  // of sums of products: `doubt`, and what bytes have too much, as they are 128 more than numbers

    void set(const ByteTable<kSize>& table, const float* from) {
        const float whole_norm = table.limits[0], lost_norm = table.limits[1], norm = table.limits[2];
        float largest = std::max(norm * 0x1p-20f, 0x1p-100f);
        for (int k = 0; k < kSize; ++k) {
            numbers[k] = from[k] - table.middle[k];
            largest = std::max(largest, std::abs(numbers[k]));
        }
        unit = largest / kLargestByte;
        float squares = 0, lost_squares = 0, total = 0;
        for (int k = 0; k < kSize; ++k) {
            // The largest byte stands in for what is not a number.
            const float exact = std::min(kLargestByte, numbers[k] / unit), whole = std::nearbyint(exact);
            bytes[k] = (int8_t)whole;
            total += whole;
            squares += exact * exact;
            lost_squares += (exact - whole) * (exact - whole);
        }
        const float size = std::sqrt(squares);
        const float rounding = std::sqrt(lost_squares) * whole_norm + size * lost_norm;
        const float arithmetic = 0x1p-20f * (whole_norm + lost_norm) * (size + norm / unit);
        doubt = (int)(rounding + arithmetic) + 2;
        start = doubt - 128 * (int)total;
    }
};

// The nearest of the centroids whose distance may be as little as that of the nearest.
template <int kSize>
int nearest_candidate(const ByteTable<kSize>& table, const float* sub_vector, const float* at_least, Lanes at_most) {
    float lanes[kLanes], best = kInfinity;
    store_lanes(lanes, at_most);
    const Lanes limit = to_all_lanes(*std::min_element(lanes, lanes + kLanes));
    int code = 0;
    for (int c = 0; c < ByteTable<kSize>::kCentroids; c += kLanes) {
        const IntLanes candidates = load_lanes(at_least + c) <= limit;
        if (!any(candidates)) continue;
        for (int lane = 0; lane < kLanes; ++lane) {
            if (!candidates[lane]) continue;
            const float distance = table.distance(c + lane, sub_vector);
            if (distance < best) best = distance, code = c + lane;
        }
    }
    return code;
}

// Nearest centroids of kTokens sub-vectors, `stride` floats apart; equal distances take the lower code.
//
// A centroid is a candidate unless another is nearer even if both distances are off by as much as they may be, so that the
// code is the one that comparing with all of them would give. A distance may be off by its own centroid's share: one that
// dwarfs the others is coarse, and they are not.
template <int kTokens, int kSize>
void nearest_of_bytes(const ByteTable<kSize>& table, const float* rows, int stride, int* codes) {
    constexpr int kCentroids = ByteTable<kSize>::kCentroids;
    ByteSubVector<kSize> sub_vectors[kTokens];
    alignas(64) float at_least[kTokens][kCentroids];
    Lanes at_most[kTokens];  // the distance of the nearest
    for (int t = 0; t < kTokens; ++t) {
        sub_vectors[t].set(table, rows + t * stride);
        at_most[t] = to_all_lanes(kInfinity);
    }
    for (int c = 0; c < kCentroids; c += kLanes) {
        // The next sub-vector's table comes from memory meanwhile.
        for (int i = 0; i < ByteTable<kSize>::kBlock; i += 64) __builtin_prefetch(table.block(c + kCentroids) + i);
        const auto* norms = (const float*)table.block(c);
        const auto* bytes = (const uint8_t*)(norms + 2 * kLanes);
        const Lanes half_norms = load_lanes(norms), units = load_lanes(norms + kLanes);
        IntLanes products[kTokens];
        for (int t = 0; t < kTokens; ++t) products[t] = IntLanes{} + sub_vectors[t].start;
        for (int k = 0; k < kSize; k += 4, bytes += 4 * kLanes)
            for (int t = 0; t < kTokens; ++t) products[t] = add_byte_products(products[t], bytes, sub_vectors[t].bytes + k);
        for (int t = 0; t < kTokens; ++t) {
            const Lanes unit = units * sub_vectors[t].unit;
            const Lanes least = half_norms - unit * __builtin_convertvector(products[t], Lanes);
            store_lanes(&at_least[t][c], least);
            at_most[t] = smaller(least + unit * (2.0f * sub_vectors[t].doubt), at_most[t]);
        }
    }
    for (int t = 0; t < kTokens; ++t)
        codes[t] = nearest_candidate(table, sub_vectors[t].numbers, at_least[t], at_most[t]);
}

}  // namespace antkv
