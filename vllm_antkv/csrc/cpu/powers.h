// Powers of two in bfloat16, for weights that are multiplied in bfloat16 anyway.
#pragma once

#include "tiles/lanes.h"

namespace antkv {

// 2^x of numbers in bfloat16. A number's seven bits of mantissa are looked up by the first seven bits behind the point of
// its exponent: to half a percent, twice what rounding a weight to bfloat16 costs.
class Powers {
  public:
    static constexpr float kUnit = 128;  // of exponents

    Powers() {
        for (int i = 0; i < 128; ++i) mantissas_[i] = (uint8_t)__builtin_lrint(128 * (__builtin_exp2(i / 128.0) - 1));
    }

    // What exponents in units are relative to.
    struct Offset {
        Lanes max, one;
        IntLanes is_near;  // `one` is a whole number that has lost nothing
    };
    static Offset offset(Lanes max) { return {max, kOne - max, (max <= kNear) & (max >= -kNear)}; }
    // Whether no lane's offset is near.
    static bool is_far(const Offset& offset) { return any(~offset.is_near); }

    // 2^((first * factor - offset.max) / kUnit), and that of `second` beside it. Less than 2^-126 is 0; so is what is not a
    // number. A lane's are the same whether other lanes are far.
    template <bool kFar>
    BitLanes of(Lanes first, Lanes second, Lanes factor, const Offset& offset) const {
        const BitLanes even = bits<kFar>(first, factor, offset), odd = bits<kFar>(second, factor, offset);
#if defined(__AVX512VBMI__)
        const __m512i both = _mm512_mask_alignr_epi8((__m512i)even, 0xCCCCCCCCCCCCCCCC, (__m512i)odd, (__m512i)odd, 14);
        const __m512i low = _mm512_load_si512(mantissas_), high = _mm512_load_si512(mantissas_ + 64);
        const __m512i mantissas = _mm512_permutex2var_epi8(low, both, high);
        return (BitLanes)_mm512_ternarylogic_epi32(_mm512_set1_epi16((short)0xFF80), both, mantissas, 0xCA);
#else
        const BitLanes both = (even & 0xFFFF) | odd << 16;
        BitLanes mantissas;
        for (int i = 0; i < kLanes; ++i)
            mantissas[i] = mantissas_[both[i] & 127] | (uint32_t)mantissas_[both[i] >> 16 & 127] << 16;
        return (both & 0xFF80FF80) | mantissas;
#endif
    }

  private:
    static constexpr float kZero = 0x1.8p23f, kOne = kZero + 127 * kUnit;
    static constexpr float kNear = 0x1p21f;

    // A sum's last bits are whole numbers: its exponent, biased as that of a bfloat16, and the index of its mantissa.
    template <bool kFar>
    static BitLanes bits(Lanes x, Lanes factor, const Offset& offset) {
        Lanes sum = x * factor + offset.one;
        if constexpr (kFar) sum = offset.is_near ? sum : (x * factor - offset.max) + kOne;
        return (BitLanes)larger(sum, to_all_lanes(kZero));
    }

    alignas(64) uint8_t mantissas_[128];
};

}  // namespace antkv
