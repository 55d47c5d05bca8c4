// Vectors of whole numbers of 16 bits, which stand for fractions, and their products.
#pragma once

#include "simd.h"

namespace antkv {

#if defined(__AVX512BW__)

typedef __m512i Fixed;
constexpr int kFixed = 32;  // numbers in a vector

// To the nearest whole numbers, ties to even.
inline IntVec to_whole(Vec x) { return (IntVec)_mm512_cvtps_epi32((__m512)x); }
inline Fixed load_fixed(const int16_t* from) { return _mm512_loadu_si512(from); }
inline Fixed add(Fixed a, Fixed b) { return _mm512_add_epi16(a, b); }
inline Fixed subtract(Fixed a, Fixed b) { return _mm512_sub_epi16(a, b); }
// a b / 2^15, rounded.
inline Fixed share(Fixed a, Fixed b) { return _mm512_mulhrs_epi16(a, b); }
inline Fixed swap_neighbours(Fixed x) { return _mm512_rol_epi32(x, 16); }
// Both products of every pair added to the sum of 32 bits.
inline Fixed add_products(Fixed sum, Fixed a, Fixed b) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, a, b);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b));
#endif
}

// Lane h of a quarter: the sum over that quarter of totals[h].
inline Fixed sums_of_quarters(const Fixed (&totals)[4]) {
    const auto pair = [](Fixed a, Fixed b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const Fixed low = pair(totals[0], totals[1]), high = pair(totals[2], totals[3]);
    return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
}
// Quarter i: the sum of the quarters of parts[i].
inline Vec sum_quarters(const Fixed (&parts)[4]) {
    const auto pair = [](Fixed a, Fixed b) {
        return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    };
    return (Vec)_mm512_cvtepi32_ps(pair(pair(parts[0], parts[1]), pair(parts[2], parts[3])));
}

#else

typedef __m256i Fixed;
constexpr int kFixed = 16;

inline IntVec to_whole(Vec x) { return (IntVec)_mm256_cvtps_epi32((__m256)x); }
inline Fixed load_fixed(const int16_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Fixed add(Fixed a, Fixed b) { return _mm256_add_epi16(a, b); }
inline Fixed subtract(Fixed a, Fixed b) { return _mm256_sub_epi16(a, b); }
inline Fixed share(Fixed a, Fixed b) { return _mm256_mulhrs_epi16(a, b); }
inline Fixed swap_neighbours(Fixed x) { return _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_srli_epi32(x, 16)); }
inline Fixed add_products(Fixed sum, Fixed a, Fixed b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }

inline Fixed sums_of_quarters(const Fixed (&totals)[4]) {
    const auto pair = [](Fixed a, Fixed b) {
        return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    };
    const Fixed low = pair(totals[0], totals[1]), high = pair(totals[2], totals[3]);
    return _mm256_add_epi32(_mm256_unpacklo_epi64(low, high), _mm256_unpackhi_epi64(low, high));
}
// Halves, in vectors of two quarters.
inline Vec sum_quarters(const Fixed (&parts)[2]) {
    const Fixed first = _mm256_permute2x128_si256(parts[0], parts[1], 0x20);
    const Fixed second = _mm256_permute2x128_si256(parts[0], parts[1], 0x31);
    return (Vec)_mm256_cvtepi32_ps(_mm256_add_epi32(first, second));
}

#endif

}  // namespace antkv
