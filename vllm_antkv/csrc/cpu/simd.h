// Vectors of float32 as wide as the instruction set this file is compiled for, in GCC's vector extensions.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace antkv {

#if defined(__AVX512F__)
constexpr int W = 16;
#else
constexpr int W = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t IntVec __attribute__((vector_size(4 * W)));
typedef uint32_t UintVec __attribute__((vector_size(4 * W)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * W)));
typedef uint8_t ByteVec __attribute__((vector_size(W)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Not `Vec{} + x`: the sum is computed, as it is another number where x is -0.
inline Vec broadcast(float x) { return x - Vec{}; }

inline Vec load(const float* from) {
    Vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }

// `kSize` floats, a power of two.
template <int kSize>
struct Floats {
    typedef float Type __attribute__((vector_size(4 * kSize)));
};

template <int kSize>
inline typename Floats<kSize>::Type load(const float* from) {
    typename Floats<kSize>::Type v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <int kSize>
inline void store(float* to, typename Floats<kSize>::Type v) {
    std::memcpy(to, &v, sizeof v);
}

// `kSize` centroid channels, at most 8, which are stored in half precision.
template <int kSize>
inline typename Floats<kSize>::Type load_half(const uint16_t* from) {
    __m128i half = _mm_setzero_si128();
    std::memcpy(&half, from, 2 * kSize);
    const __m256 wide = _mm256_cvtph_ps(half);
    typename Floats<kSize>::Type v;
    std::memcpy(&v, &wide, sizeof v);
    return v;
}

// Tags of the model dtype, with W elements to and from float32.
struct Float32 {
    using Storage = float;
    static Vec load(const Storage* from) { return antkv::load(from); }
    static void store(Storage* to, Vec v) { antkv::store(to, v); }
};

struct BFloat16 {
    using Storage = uint16_t;
    static Vec load(const Storage* from) {
        // What compilers make of __builtin_convertvector takes twice as many instructions.
#if defined(__AVX512F__)
        const UintVec bits = (UintVec)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
#else
        const UintVec bits = (UintVec)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
#endif
        return (Vec)(bits << 16);
    }
    static void store(Storage* to, Vec v) {
        // Round to nearest, ties to even.
        const UintVec bits = (UintVec)v;
        const HalfVec half = __builtin_convertvector((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, HalfVec);
        std::memcpy(to, &half, sizeof half);
    }
};

struct Float16 {
    using Storage = uint16_t;
#if defined(__AVX512F__)
    static Vec load(const Storage* from) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
    static void store(Storage* to, Vec v) {
        _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
    }
#else
    static Vec load(const Storage* from) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
    static void store(Storage* to, Vec v) {
        _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
    }
#endif
};

// What anchors store (`correction` in vllm_antkv/ops/reference.py): sign, 4 bits of exponent, 3 of mantissa.
struct E4M3 {
    using Storage = uint8_t;
    static Vec load(const Storage* from) {
        // Bits of float16, whose exponent is biased by 8 more.
#if defined(__AVX512F__)
        const HalfVec byte = (HalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from));
#else
        const HalfVec byte = (HalfVec)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from));
#endif
        const HalfVec half = (byte & 0x80) << 8 | (byte & 0x7F) << 7;
        return Float16::load((const uint16_t*)&half) * 256.0f;
    }
    // Rounds to nearest, ties to even; saturates.
    static void store(Storage* to, Vec v) {
        const UintVec sign = (UintVec)v >> 31 << 7;
        Vec size = (Vec)((UintVec)v << 1 >> 1);
        size = size < 448.0f ? size : broadcast(448.0f);
        const UintVec bits = (UintVec)size;
        const UintVec normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
        // Below 2^-6 the numbers are multiples of 2^-9: a sum with 2^14 is rounded to one.
        const UintVec tiny = (UintVec)(size + 0x1p14f) - (UintVec)broadcast(0x1p14f);
        const ByteVec bytes = __builtin_convertvector((size < 0x1p-6f ? tiny : normal) | sign, ByteVec);
        std::memcpy(to, &bytes, sizeof bytes);
    }
};

template <typename Element>
inline void widen(const typename Element::Storage* from, int size, float* to) {
    for (int c = 0; c < size; c += W) store(to + c, Element::load(from + c));
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// e^x to about 2 units in the last place (Cephes' polynomial); 0 below -87.
inline Vec exponential(Vec x) {
    const Vec scaled = x * 1.44269504088896341f;
    const IntVec power = __builtin_convertvector(scaled + (scaled < 0 ? broadcast(-0.5f) : broadcast(0.5f)), IntVec);
    const Vec whole = __builtin_convertvector(power, Vec);
    const Vec rest = x - whole * 0.693359375f - whole * -2.12194440e-4f;
    Vec y = broadcast(1.9875691500e-4f);
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    const Vec result = y * (Vec)((power + 127) << 23);
    return x < -87.0f ? Vec{} : result;
}

// Lanes of both halves taken together, until one is left.
template <int kSize = W, typename Op>
inline float reduce(typename Floats<kSize>::Type v, Op op) {
    if constexpr (kSize == 2) {
        return op(v[0], v[1]);
    } else {
        typename Floats<kSize / 2>::Type halves[2];
        std::memcpy(halves, &v, sizeof v);
        return reduce<kSize / 2>(op(halves[0], halves[1]), op);
    }
}

inline float sum(Vec v) {
    return reduce(v, [](auto a, auto b) { return a + b; });
}

inline float largest(Vec v) {
    return reduce(v, [](auto a, auto b) { return a > b ? a : b; });
}

inline float smallest(Vec v) {
    return reduce(v, [](auto a, auto b) { return a < b ? a : b; });
}

// Lanes of `a` and of `b`, which are counted on from those of `a`, in this order. GCC knows __builtin_shufflevector from 12 on.
template <int... kOrder, class Vector>
inline Vector shuffled(Vector a, Vector b) {
    using Order = decltype(a == b);
    return __builtin_shuffle(a, b, Order{kOrder...});
}

// Lanes of `a` and `b` in turns: a0 b0 a1 b1 ...
inline void interleave(Vec& a, Vec& b) {
#if defined(__AVX512F__)
    const Vec low = shuffled<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
    b = shuffled<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
#else
    const Vec low = shuffled<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
    b = shuffled<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
#endif
    a = low;
}

// Lanes of `kCount` rows in turns, a power of two; the rows follow each other: rows[0][0], rows[1][0], ...
template <int kCount>
inline void interleave(Vec (&rows)[kCount]) {
    if constexpr (kCount > 1) {
        constexpr int kHalf = kCount / 2;
        Vec even[kHalf], odd[kHalf];
        for (int i = 0; i < kHalf; ++i) {
            even[i] = rows[2 * i];
            odd[i] = rows[2 * i + 1];
        }
        interleave<kHalf>(even);
        interleave<kHalf>(odd);
        for (int i = 0; i < kHalf; ++i) {
            interleave(even[i], odd[i]);
            rows[2 * i] = even[i];
            rows[2 * i + 1] = odd[i];
        }
    }
}

// Sums of neighbouring lanes: those of `a`, then those of `b`.
inline Vec pair_sums(Vec a, Vec b) {
#if defined(__AVX512F__)
    const Vec even = shuffled<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
    const Vec odd = shuffled<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
#else
    const Vec even = shuffled<0, 2, 4, 6, 8, 10, 12, 14>(a, b);
    const Vec odd = shuffled<1, 3, 5, 7, 9, 11, 13, 15>(a, b);
#endif
    return even + odd;
}

// Lane i is the sum of the lanes of vectors[i]; overwrites them.
inline Vec sums(Vec (&vectors)[W]) {
    for (int count = W; count > 1; count /= 2)
        for (int i = 0; i < count / 2; ++i) vectors[i] = pair_sums(vectors[2 * i], vectors[2 * i + 1]);
    return vectors[0];
}

}  // namespace antkv
