// What codes stand for: rows decoded, rotated by their positions, multiplied with queries.
#pragma once

#include "pages.h"
#include "rows.h"
#include "tiles/lanes.h"

// For look-ups in hot loops. Compilers inline until a file has grown by so much, and what one more format adds would
// otherwise put these out of line in the loops of all others.
#define ANTKV_INLINE [[gnu::always_inline]] inline

namespace antkv {

// The code of sub-vector `s` in a row of packed codes; 12-bit codes lie two in three bytes.
template <bool kIs12Bit>
ANTKV_INLINE unsigned code_at(const uint8_t* codes, unsigned s) {
    if (!kIs12Bit) return codes[s];
    uint16_t bits;
    std::memcpy(&bits, codes + s / 2 * 3 + s % 2, sizeof bits);
    return s % 2 ? bits >> 4 : bits & 0xFFF;
}

// The centroids of one KV head: (num_sub_vectors, num_centroids, kSize) numbers of 16 bits.
template <int kSize, bool kTwelveBits>
struct Centroids {
    static constexpr int kChannels = kSize;
    static constexpr bool kIs12Bit = kTwelveBits;
    static constexpr int kTable = (kIs12Bit ? 4096 : 256) * kSize;  // entries of a sub-vector
    const uint16_t* data;

    // Channels whose codes are whole bytes.
    static constexpr int kByteAligned = kIs12Bit ? 2 * kSize : kSize;
    // Centroids from the kByteAligned channels on that `c` is among, and the first byte of their codes. A loop that counts
    // channels from there has its tables at fixed distances, and one register for all of them.
    ANTKV_INLINE Centroids from(unsigned c) const { return {data + (size_t)(c / kByteAligned) * (kByteAligned / kSize) * kTable}; }
    ANTKV_INLINE static unsigned byte_of(unsigned c) { return c / kByteAligned * (kIs12Bit ? 3 : 1); }

    // Channels c .. c + 16 of the row that the codes stand for. In registers: small stores before a wide load would stall it.
    ANTKV_INLINE __m256i sixteen(const uint8_t* codes, unsigned c) const {
        const unsigned s = c / kSize;
        if constexpr (kSize >= 16) {
            return _mm256_loadu_si256((const __m256i*)(at(codes, s) + c % kSize));
        } else if constexpr (kSize == 8) {
            const auto load8 = [&](unsigned i) { return _mm_loadu_si128((const __m128i*)at(codes, s + i)); };
            return _mm256_inserti128_si256(_mm256_castsi128_si256(load8(0)), load8(1), 1);
        } else if constexpr (kSize == 4) {
            return _mm256_set_epi64x(part(codes, s + 3), part(codes, s + 2), part(codes, s + 1), part(codes, s));
        } else {
            return _mm256_set_epi32(part(codes, s + 7), part(codes, s + 6), part(codes, s + 5), part(codes, s + 4),
                                    part(codes, s + 3), part(codes, s + 2), part(codes, s + 1), part(codes, s));
        }
    }
    // Channels c .. c + W as float32, of centroids in float16.
    ANTKV_INLINE Vec channels(const uint8_t* codes, unsigned c) const {
#if defined(__AVX512F__)
        return (Vec)_mm512_cvtph_ps(sixteen(codes, c));
#else
        const unsigned s = c / kSize;
        if constexpr (kSize >= W) return Float16::load(at(codes, s) + c % kSize);
        else if constexpr (kSize == 4) return (Vec)_mm256_cvtph_ps(_mm_set_epi64x(part(codes, s + 1), part(codes, s)));
        else
            return (Vec)_mm256_cvtph_ps(
                _mm_set_epi32(part(codes, s + 3), part(codes, s + 2), part(codes, s + 1), part(codes, s)));
#endif
    }
    ANTKV_INLINE const uint16_t* at(const uint8_t* codes, unsigned s) const {
        size_t row = code_at<kIs12Bit>(codes, s), size = kSize * sizeof *data;
        // An address takes an index times 8. For 16 bytes, adding the code to itself does the rest on any port; shifting it by
        // 4, as compilers would, on two that vectors need.
        if constexpr (kSize == 8) {
            row += row;
            asm("" : "+r"(row));
            size = 8;
        }
        return (const uint16_t*)((const char*)(data + (size_t)s * kTable) + row * size);
    }

  private:
    ANTKV_INLINE auto part(const uint8_t* codes, unsigned s) const {
        std::conditional_t<kSize == 2, int32_t, int64_t> bits;
        std::memcpy(&bits, at(codes, s), sizeof bits);
        return bits;
    }
};

template <int kSize, typename Kernel>
void with_centroids(const antkv_layer& layer, const uint16_t* data, Kernel kernel) {
    if (layer.num_centroids == 256) return kernel(Centroids<kSize, false>{data});
    return kernel(Centroids<kSize, true>{data});
}

// Call `kernel` with a head's part of `centroids`, one of the layer's tables, typed by their format.
template <typename Kernel>
void with_centroids(const antkv_layer& layer, int head, const uint16_t* centroids, Kernel kernel) {
    const uint16_t* data = centroids + (int64_t)head * layer.num_centroids * layer.head_size;
    switch (layer.sub_vector_size) {
        case 2: return kernel(Centroids<2, false>{data});
        case 4: return kernel(Centroids<4, false>{data});
        case 8: return kernel(Centroids<8, false>{data});
        case 16: return with_centroids<16>(layer, data, kernel);
        default: return with_centroids<32>(layer, data, kernel);
    }
}

// Channels c .. c + 16 of the row that the codes stand for, of centroids in float16.
template <typename Table>
ANTKV_INLINE Lanes sixteen_channels(Table centroids, const uint8_t* codes, unsigned c) {
#if defined(__AVX512F__)
    return centroids.channels(codes, c);
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; i += W) store(lanes + i, centroids.channels(codes, c + i));
    return load_lanes(lanes);
#endif
}

// Rows (count, head_size) that the codes of `count` tokens stand for; K before RoPE.
inline void decode_rows(const antkv_layer& layer, int head, bool of_values, const uint8_t* codes, int count,
                        float* rows) {
    const unsigned size = layer.head_size, code_bytes = layer.code_bytes;
    with_centroids(layer, head, of_values ? layer.v_centroids : layer.k_centroids, [=](auto centroids) {
        for (int t = 0; t < count; ++t)
            for (unsigned c = 0; c < size; c += W)
                store(rows + (size_t)t * size + c, centroids.channels(codes + (size_t)t * code_bytes, c));
    });
}

// Channels of a K row, or of a query, as sub-vectors take them.
inline void to_code_order(const antkv_layer& layer, float* row) {
    if (!layer.k_order) return;
    float as_it_is[256];
    std::copy_n(row, layer.head_size, as_it_is);
    for (int c = 0; c < layer.head_size; ++c) row[c] = as_it_is[layer.k_order[c]];
}

// Inverse of `to_code_order`.
inline void to_model_order(const antkv_layer& layer, float* row) {
    if (!layer.k_order) return;
    float as_it_is[256];
    std::copy_n(row, layer.head_size, as_it_is);
    for (int c = 0; c < layer.head_size; ++c) row[layer.k_order[c]] = as_it_is[c];
}

// `to_code_order` of K rows as they are in memory.
class CodeOrder {
  public:
    explicit CodeOrder(const antkv_layer& layer) : layer_(layer) {
        if (layer.k_order) std::copy_n(layer.k_order, layer.head_size, channels_);
    }

    // As float32.
    void widen(const void* from, float* to) const {
        if (!layer_.k_order || layer_.dtype == ANTKV_FLOAT32) {
            antkv::widen(layer_, from, layer_.head_size, to);
            to_code_order(layer_, to);
            return;
        }
        alignas(64) uint16_t ordered[kMaxHeadSize];
        reorder((const uint16_t*)from, ordered);
        antkv::widen(layer_, ordered, layer_.head_size, to);
    }

  private:
    void reorder(const uint16_t* from, uint16_t* to) const {
        const int size = layer_.head_size;
#if defined(__AVX512BW__)
        constexpr int kNumbers = 32;  // of a vector
        __m512i row[kMaxHeadSize / kNumbers];
        for (int c = 0; c < size; c += 2 * kNumbers) {
            row[c / kNumbers] = _mm512_maskz_loadu_epi16(first_numbers(size - c), from + c);
            row[c / kNumbers + 1] = _mm512_maskz_loadu_epi16(first_numbers(size - c - kNumbers), from + c + kNumbers);
        }
        for (int c = 0; c < size; c += kNumbers) {
            const __m512i at = _mm512_load_si512(channels_ + c);
            __m512i result = _mm512_permutex2var_epi16(row[0], at, row[1]);
            // Look-ups are of 64 channels.
            for (int other = 2 * kNumbers; other < size; other += 2 * kNumbers) {
                const __mmask32 of_other = _mm512_cmpge_epu16_mask(at, _mm512_set1_epi16((short)other));
                const __m512i found = _mm512_permutex2var_epi16(row[other / kNumbers], at, row[other / kNumbers + 1]);
                result = _mm512_mask_blend_epi16(of_other, result, found);
            }
            _mm512_store_si512(to + c, result);
        }
#else
        for (int c = 0; c < size; ++c) to[c] = from[channels_[c]];
#endif
    }
#if defined(__AVX512BW__)
    static __mmask32 first_numbers(int count) {
        return count >= 32 ? ~(__mmask32)0 : count <= 0 ? 0 : ((__mmask32)1 << count) - 1;
    }
#endif

    const antkv_layer& layer_;
    alignas(64) uint16_t channels_[kMaxHeadSize] = {};
};

// Adds to the decoded `rows` of a block what an anchor has of one of them, or puts the row there.
inline void correct(VQPage page, int anchor, bool of_values, float* rows) {
    const int offset = page.anchor_offsets(of_values)[anchor], size = page.layer.head_size;
    if (offset < 0) return;
    if (offset >= kExactAnchor) {
        float* row = rows + (int64_t)(offset - kExactAnchor) * size;
        widen(page.layer, page.anchor(of_values, anchor), size, row);
        if (!of_values) to_code_order(page.layer, row);
        return;
    }
    alignas(64) float correction[kMaxHeadSize];
    widen<E4M3>(page.anchor(of_values, anchor), size, correction);
    if (!of_values) to_code_order(page.layer, correction);
    for (int c = 0; c < size; ++c) rows[(int64_t)offset * size + c] += correction[c];
}

// Rotate a row by the angles whose cosines and sines are given; `sign` -1 rotates back.
inline void rotate(const antkv_layer& layer, float* __restrict row, const float* __restrict cos,
                   const float* __restrict sin, float sign) {
    const int half = layer.rotary_dim / 2;
    if (layer.is_neox_style) {
        for (int c = 0; c < half; ++c) {
            const float a = row[c], b = row[c + half], s = sign * sin[c];
            row[c] = a * cos[c] - b * s;
            row[c + half] = b * cos[c] + a * s;
        }
    } else {
        for (int c = 0; c < half; ++c) {
            const float a = row[2 * c], b = row[2 * c + 1], s = sign * sin[c];
            row[2 * c] = a * cos[c] - b * s;
            row[2 * c + 1] = b * cos[c] + a * s;
        }
    }
}

// Cosines and sines of a position. Angles are linear in the position, so those of a token are those of the first token of
// a tile plus those of its offset: a table of few rows stays in cache, one of the whole context does not.
struct Angles {
    const float *cos, *sin;

    Angles(const antkv_layer& layer, int position)
        : cos(layer.cos + (int64_t)position * (layer.rotary_dim / 2)),
          sin(layer.sin + (int64_t)position * (layer.rotary_dim / 2)) {}
};

// Cosines and sines that rotate K of one token.
class TokenAngles {
  public:
    TokenAngles(const Sequence& sequence, int position) {
        const antkv_layer& layer = sequence.layer;
        const int run = sequence.first_of_run(position, 1), half = layer.rotary_dim / 2;
        if (run >= 0) {
            const Angles angles(layer, run);
            cos = angles.cos;
            sin = angles.sin;
            return;
        }
        const int32_t* three = sequence.three_positions(position);
        for (int c = 0; c < half; ++c) {
            const int64_t at = (int64_t)three[layer.sections[c]] * half + c;
            own_[0][c] = layer.cos[at];
            own_[1][c] = layer.sin[at];
        }
        cos = own_[0];
        sin = own_[1];
    }
    TokenAngles(const TokenAngles&) = delete;

    const float *cos, *sin;

  private:
    float own_[2][kMaxHeadSize / 2];
};

// Rotate a query back by the position of a tile's first token: what K rows rotated by their offsets are multiplied with.
inline void rotate_back(const antkv_layer& layer, int position, float* query) {
    if (!layer.cos) return;
    const Angles base(layer, position);
    rotate(layer, query, base.cos, base.sin, -1);
    if (layer.rotary_magnitude == 1) return;
    for (int c = 0; c < layer.rotary_dim; ++c) query[c] /= layer.rotary_magnitude;
}

// Decoded K rows of `count` tokens of a tile, rotated by their offsets in the tile alone.
inline void offset_keys(const antkv_layer& layer, int head, const uint8_t* codes, int count, float* rows) {
    decode_rows(layer, head, false, codes, count, rows);
    if (!layer.cos) return;
    for (int t = 0; t < count; ++t) {
        const Angles angles(layer, t);
        rotate(layer, rows + (int64_t)t * layer.head_size, angles.cos, angles.sin, 1);
    }
}

// Decoded K rows of `count` tokens of a VQ page, from `position` on, as attention uses them, rotated by their positions.
inline void rotated_keys(const Sequence& sequence, int position, int count, float* rows) {
    const antkv_layer& layer = sequence.layer;
    const uint8_t* codes = sequence.vq_page(position / kBlockSize).codes(false, position % kBlockSize);
    if (layer.positions) {
        decode_rows(layer, sequence.head, false, codes, count, rows);
        for (int t = 0; t < count; ++t) {
            const TokenAngles angles(sequence, position + t);
            rotate(layer, rows + (int64_t)t * layer.head_size, angles.cos, angles.sin, 1);
        }
        return;
    }
    offset_keys(layer, sequence.head, codes, count, rows);
    if (!layer.cos || position == 0) return;
    const Angles base(layer, position);
    for (int t = 0; t < count; ++t) {
        float* row = rows + (int64_t)t * layer.head_size;
        rotate(layer, row, base.cos, base.sin, 1);
        if (layer.rotary_magnitude == 1) continue;
        for (int c = 0; c < layer.rotary_dim; ++c) row[c] /= layer.rotary_magnitude;
    }
}

// Whether `dot_rotated` can do this layer: channel c rotates with c + rotary_dim / 2, and vectors fill a half.
inline bool rotates_in_halves(const antkv_layer& layer) {
    return layer.cos && layer.is_neox_style && layer.rotary_dim % (2 * W) == 0;
}

// Tokens that `dot_rotated` multiplies at once: a query's channels are loaded once for all of them, and there are registers
// for a total of each with each head.
template <int kHeads>
constexpr int kTokensAtOnce = W == 16 ? (kHeads > 4 ? 2 : 4) : (kHeads > 2 ? 1 : 2);

// out[h][t] = queries[h] . `offset_keys`[t], without storing the rows. `count` is rounded up to W in `out`. Where
// kHeadSize is not 0, heads have that many channels and all of them rotate: addresses are then known to the compiler.
template <int kHeads, unsigned kHeadSize, typename Table>
void dot_rotated(const antkv_layer& layer, Table centroids, const uint8_t* codes, int count, const float* queries,
                float* out, int out_stride) {
    constexpr int kTokens = kTokensAtOnce<kHeads>;
    const unsigned size = kHeadSize ? kHeadSize : layer.head_size;
    const unsigned half = (kHeadSize ? kHeadSize : layer.rotary_dim) / 2;
    Vec partial[kHeads][W];
    for (int first = 0; first < count; first += W) {
        for (int lane = 0; lane < W; lane += kTokens) {
            const uint8_t* row[kTokens];
            const float *cos[kTokens], *sin[kTokens];
            for (int i = 0; i < kTokens; ++i) {
                // Rows past the end are not read; what stands in their place is never used.
                const int t = std::min(first + lane + i, count - 1);
                row[i] = codes + (int64_t)t * layer.code_bytes;
                const Angles angles(layer, t);
                cos[i] = angles.cos;
                sin[i] = angles.sin;
            }
            Vec total[kTokens][kHeads] = {};
            for (unsigned c = 0; c < half; c += W) {
                Vec low[kTokens], high[kTokens];
                for (int i = 0; i < kTokens; ++i) {
                    const Vec a = centroids.channels(row[i], c), b = centroids.channels(row[i], c + half);
                    const Vec cosine = load(cos[i] + c), sine = load(sin[i] + c);
                    low[i] = a * cosine - b * sine;
                    high[i] = b * cosine + a * sine;
                }
                for (int h = 0; h < kHeads; ++h) {
                    const Vec first_half = load(queries + h * size + c), second_half = load(queries + h * size + c + half);
                    for (int i = 0; i < kTokens; ++i) total[i][h] += first_half * low[i];
                    for (int i = 0; i < kTokens; ++i) total[i][h] += second_half * high[i];
                }
            }
            for (unsigned c = 2 * half; c < size; c += W) {
                Vec key[kTokens];
                for (int i = 0; i < kTokens; ++i) key[i] = centroids.channels(row[i], c);
                for (int h = 0; h < kHeads; ++h) {
                    const Vec query = load(queries + h * size + c);
                    for (int i = 0; i < kTokens; ++i) total[i][h] += query * key[i];
                }
            }
            for (int h = 0; h < kHeads; ++h)
                for (int i = 0; i < kTokens; ++i) partial[h][lane + i] = total[i][h];
        }
        for (int h = 0; h < kHeads; ++h) store(out + h * out_stride + first, sums(partial[h]));
    }
}

// out[h][t] = queries[h] . key[t] over the coded keys of a tile; the queries are rotated back by the tile's position.
inline void dot_codes(const antkv_layer& layer, int head, const uint8_t* codes, int count, int num_heads,
                      const float* queries, float* out, int out_stride, float* rows) {
    if (!rotates_in_halves(layer)) {
        offset_keys(layer, head, codes, count, rows);
        dot_rows(num_heads, queries, rows, layer.head_size, count, out, out_stride);
        return;
    }
    with_centroids(layer, head, layer.k_centroids, [&](auto centroids) {
        const auto dot = [&](auto head_size) {
            for_heads(num_heads, [&](auto heads, int h) {
                dot_rotated<heads, head_size>(layer, centroids, codes, count, queries + h * layer.head_size,
                                             out + h * out_stride, out_stride);
            });
        };
        if (layer.head_size == 128 && layer.rotary_dim == 128) dot(std::integral_constant<unsigned, 128>{});
        else dot(std::integral_constant<unsigned, 0>{});
    });
}

}  // namespace antkv
