// Weighted sums of coded values by products of tiles: decode.
#pragma once

#include "codes.h"
#include "tiles/tiles.h"

namespace antkv {

inline bool tile_values_fit(const antkv_layer& layer) { return layer.tiles && layer.dtype == ANTKV_BFLOAT16; }

// out[h] += sum over tokens of weights[h][token] row[token] for up to kHeads heads.
//
// centroids: in bfloat16. codes(t): the codes of kKeys tokens from t on; is_coded(t): whether any of them has a weight.
// weights: finite, 0 behind the last token up to a multiple of kKeys; `stride` floats from head to head.
template <typename Tiles, int kHeads, typename Table, typename Codes, typename IsCoded>
void add_in_tiles(const antkv_layer& layer, Table centroids, int num_tokens, Codes codes, IsCoded is_coded,
                  const float* weights, int stride, int num_heads, float* out) {
    using Values = typename Tiles::template Values<kHeads>;
    Values sums;
    alignas(64) BFloat rows[kKeys * kValues] = {}, packed[Values::kWeightElements];
    const int64_t code_bytes = layer.code_bytes;
    for (int c = 0; c < layer.head_size; c += kValues) {
        const int size = std::min(kValues, layer.head_size - c);
        const Table table = centroids.from(c);
        sums.clear();
        for (int first = 0; first < num_tokens; first += kKeys) {
            if (!is_coded(first)) continue;
            const uint8_t* from = codes(first) + Table::byte_of(c);
            Values::pack(weights + first, stride, num_heads, packed);
            if constexpr (!Tiles::kIsFast) {
                if (size % kTileDepth == 0) {
                    const auto row = [&](int t, int half) {
                        const int at = half * kTileDepth;
                        const __m256i low = table.sixteen(from + t * code_bytes, at);
                        const __m256i high = table.sixteen(from + t * code_bytes, at + kLanes);
                        return (BitLanes)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
                    };
                    sums.add_rows(row, size / kTileDepth, packed);
                    continue;
                }
            }
            const auto decode = [&](int channels) {
                for (int t = 0; t < kKeys; ++t, from += code_bytes)
                    for (int i = 0; i < channels; i += kLanes)
                        _mm256_store_si256((__m256i*)(rows + t * kValues + i), table.sixteen(from, i));
            };
            // A number that the compiler knows gives every table an address in the instruction that reads it.
            if (size == kValues) decode(kValues);
            else decode(size);
            sums.add(rows, packed);
        }
        sums.add_to(out + c, layer.head_size, num_heads, size);
    }
}

}  // namespace antkv
