// Codes as offsets into the tables of centroids, many at a time: a look-up is then two instructions.
#pragma once

#include "codes.h"

#if defined(__AVX512F__)

namespace antkv {

// Of kTokens tokens.
template <typename Table, int kTokens>
class CodeOffsets {
  public:
    static constexpr int kSize = Table::kChannels;

    CodeOffsets(const Table& centroids, int head_size)
        : tables_((const char*)centroids.data), num_sub_vectors_(head_size / kSize) {}

    void set(const uint8_t* codes, int64_t code_bytes) {
        const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        const __m512i first = _mm512_mullo_epi32(lanes, _mm512_set1_epi32(Table::kTable * 2));
        for (int t = 0; t < kTokens; ++t, codes += code_bytes) {
            for (int s = 0; s < num_sub_vectors_; s += kLanesAtOnce) {
                const __m512i tables = _mm512_add_epi32(first, _mm512_set1_epi32(s * Table::kTable * 2));
                const __m512i code = load(codes, s);
                _mm512_storeu_si512(&offsets_[t][s], _mm512_add_epi32(_mm512_slli_epi32(code, kShift), tables));
            }
        }
    }

    const uint32_t* row(int t) const { return offsets_[t]; }
    // Channels c .. c + 16 of the token whose row it is.
    __m256i sixteen(const uint32_t* row, unsigned c) const {
        const uint32_t* at = row + c / kSize;
        const auto from = [&](int i) { return tables_ + at[i]; };
        if constexpr (kSize >= 16) {
            return _mm256_loadu_si256((const __m256i*)(from(0) + c % kSize * 2));
        } else if constexpr (kSize == 8) {
            return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)from(0))),
                                           _mm_loadu_si128((const __m128i*)from(1)), 1);
        } else if constexpr (kSize == 4) {
            const auto part = [&](int i) { return load_as<int64_t>(from(i)); };
            return _mm256_set_epi64x(part(3), part(2), part(1), part(0));
        } else {
            const auto part = [&](int i) { return load_as<int32_t>(from(i)); };
            return _mm256_set_epi32(part(7), part(6), part(5), part(4), part(3), part(2), part(1), part(0));
        }
    }

  private:
    static constexpr int kLanesAtOnce = Table::kTwelve ? 8 : 16;
    static constexpr int kShift = __builtin_ctz(kSize) + 1;  // of a code to bytes

    template <typename T>
    static T load_as(const char* from) {
        T bits;
        std::memcpy(&bits, from, sizeof bits);
        return bits;
    }
    // Codes s .. s + kLanesAtOnce; what is behind the last of them is anything.
    static __m512i load(const uint8_t* codes, int s) {
        if constexpr (Table::kTwelve) {
            // Two in three bytes: the bytes of each, then its bits. Eight codes take 12 bytes, and rows follow each other.
            const __mmask16 there = 0x0FFF;
            const __m128i bytes = _mm_maskz_loadu_epi8(there, codes + s / 2 * 3);
            const __m128i low = _mm_shuffle_epi8(bytes, _mm_set_epi8(11, 10, 10, 9, 8, 7, 7, 6, 5, 4, 4, 3, 2, 1, 1, 0));
            const __m512i both = _mm512_castsi256_si512(_mm256_cvtepu16_epi32(low));
            const __m512i odd = _mm512_set_epi32(4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0, 4, 0);
            return _mm512_and_si512(_mm512_srlv_epi32(both, odd), _mm512_set1_epi32(0xFFF));
        } else {
            return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(codes + s)));
        }
    }

    const char* tables_;
    const int num_sub_vectors_;
    uint32_t offsets_[kTokens][256 / kSize + 16];  // 16 are written at once
};

}  // namespace antkv

#endif
