// Vectors of 16 numbers, a row of a tile of sums, whatever the instruction set: where registers hold 8, the compiler takes
// two. Conversions from and to bfloat16 do what VCVTNE2PS2BF16 does on every processor.
#pragma once

#include "../simd.h"

namespace antkv {

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));
typedef uint32_t BitLanes __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t BFloat;  // bits of a bfloat16

inline Lanes load_lanes(const float* from) { return load<kLanes>(from); }
inline void store_lanes(float* to, Lanes v) { store<kLanes>(to, v); }
inline Lanes to_all_lanes(float x) { return x - Lanes{}; }
// from[at[0]], from[at[1]] ...
inline Lanes gather_lanes(const float* from, BitLanes at) {
#if defined(__AVX512F__)
    // A gather overwrites its mask: were it that of the one before, it would wait for it.
    uint32_t all = 0xFFFF;
    asm("" : "+r"(all));
    return (Lanes)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), (__mmask16)all, (__m512i)at, from, sizeof *from);
#else
    Lanes v;
    for (int i = 0; i < kLanes; ++i) v[i] = from[at[i]];
    return v;
#endif
}

// The larger and the smaller number of each lane, that of `b` where one of them is not a number.
inline Lanes larger(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline Lanes smaller(Lanes a, Lanes b) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}

// To the nearest whole number, of numbers below 2^22.
inline Lanes whole_numbers(Lanes v) { return v + 0x1.8p23f - 0x1.8p23f; }
inline Lanes square_root(Lanes v) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_sqrt_ps((__m512)v);
#else
    for (int i = 0; i < kLanes; ++i) v[i] = __builtin_sqrtf(v[i]);
    return v;
#endif
}

// Whether any lane is not 0.
inline bool any(IntLanes v) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)v, (__m512i)v);
#else
    int32_t all = 0;
    for (int i = 0; i < kLanes; ++i) all |= v[i];
    return all;
#endif
}

inline BitLanes load_pairs(const BFloat* from) {
    BitLanes v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
inline void store_pairs(BFloat* to, BitLanes v) { std::memcpy(to, &v, sizeof v); }

// Every lane of `pairs` holds two bfloat16 numbers, the first of them in its lower half.
inline Lanes first_of_pairs(BitLanes pairs) { return (Lanes)(pairs << 16); }
inline Lanes second_of_pairs(BitLanes pairs) { return (Lanes)(pairs & 0xFFFF0000); }

// Numbers rounded to bfloat16, in the upper halves of lanes: to nearest, ties to even; denormal numbers become 0.
inline BitLanes round_to_bfloat16(Lanes x) {
    const BitLanes bits = (BitLanes)x, size = bits & 0x7FFFFFFF;
    const BitLanes rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000;
    const BitLanes finite = size < 0x00800000 ? bits & 0x80000000 : rounded;
    return size > 0x7F800000 ? (bits | 0x00400000) & 0xFFFF0000 : finite;
}

// Both numbers of every pair added to the sum.
inline Lanes add_pairs(Lanes sum, BitLanes pairs) {
#if defined(__AVX512BF16__)
    return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3F80));
#else
    return sum + second_of_pairs(pairs) + first_of_pairs(pairs);
#endif
}

// 32 bfloat16 numbers in a row: those of `low`, then those of `high`.
inline BitLanes to_bfloat16(Lanes low, Lanes high) {
#if defined(__AVX512BF16__)
    return (BitLanes)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
    typedef uint16_t Row __attribute__((vector_size(2 * kLanes)));
    const Row rows[2] = {__builtin_convertvector(round_to_bfloat16(low) >> 16, Row),
                         __builtin_convertvector(round_to_bfloat16(high) >> 16, Row)};
    return load_pairs((const BFloat*)rows);
#endif
}

// 16 of them.
inline void store_sixteen(BFloat* to, Lanes x) {
    const BitLanes numbers = to_bfloat16(x, x);
    std::memcpy(to, &numbers, kLanes * sizeof *to);
}

// Pairs of numbers, first[i] and second[i], rounded to bfloat16.
inline BitLanes to_pairs(Lanes first, Lanes second) {
    const Words numbers = (Words)to_bfloat16(first, second);
    return (BitLanes)shuffled<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                              29, 14, 30, 15, 31>(numbers, numbers);
}

// 32 bfloat16 numbers in a row: the first of the pairs of `a`, then those of `b`.
inline BitLanes firsts_of_pairs(BitLanes a, BitLanes b) {
    return (BitLanes)shuffled<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50,
                              52, 54, 56, 58, 60, 62>((Words)a, (Words)b);
}
inline BitLanes seconds_of_pairs(BitLanes a, BitLanes b) {
    return (BitLanes)shuffled<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51,
                              53, 55, 57, 59, 61, 63>((Words)a, (Words)b);
}

// 32 bfloat16 numbers, one in the lower half of every lane.
inline void widen(BitLanes numbers, BitLanes (&lanes)[2]) {
    typedef uint16_t Row __attribute__((vector_size(2 * kLanes)));
    Row rows[2];
    std::memcpy(rows, &numbers, sizeof rows);
    for (int i = 0; i < 2; ++i) lanes[i] = __builtin_convertvector(rows[i], BitLanes);
}

// Transposed in place: lane i of row j becomes lane j of row i.
inline void transpose(Lanes (&rows)[kLanes]) {
#if defined(__AVX512F__)
    interleave<kLanes>(rows);
#else
    float columns[kLanes][kLanes];
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < kLanes; ++j) columns[j][i] = rows[i][j];
    for (int i = 0; i < kLanes; ++i) rows[i] = load_lanes(columns[i]);
#endif
}

// Lanes of `a` and `b` in turns, those of a first: 0 .. 8 of both, and 8 .. 16.
inline void interleave(Lanes a, Lanes b, Lanes& low, Lanes& high) {
    low = shuffled<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b);
    high = shuffled<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(a, b);
}

// Row i gets lanes i, i + kCount, ... of the rows in turn.
template <int kCount>
void deinterleave(Lanes (&rows)[kCount]) {
    if constexpr (kCount > 1) {
        constexpr int kHalf = kCount / 2;
        Lanes even[kHalf], odd[kHalf];
        for (int i = 0; i < kHalf; ++i) {
            const Lanes a = rows[2 * i], b = rows[2 * i + 1];
            even[i] = shuffled<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
            odd[i] = shuffled<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
        }
        deinterleave<kHalf>(even);
        deinterleave<kHalf>(odd);
        for (int i = 0; i < kHalf; ++i) {
            rows[2 * i] = even[i];
            rows[2 * i + 1] = odd[i];
        }
    }
}

}  // namespace antkv
