// csrc/cpu/tiles as functions that Python can call: one library per instruction set it is compiled for.
#include "tiles/tiles.h"

using namespace antkv;

namespace {

#if defined(__AMX_BF16__)
using Tiles = AmxTiles;
#elif defined(__AVX512BF16__)
using Tiles = VectorTiles;
#else
using Tiles = PlainTiles;
#endif

}  // namespace

extern "C" {

// Returns how often `meanwhile` was called.
int product(const BFloat* a, int64_t a_next, int64_t a_other, const BFloat* b, int64_t b_next, int64_t b_other, int depth,
            float* sums, int stride, int add) {
    int calls = 0;
    const auto meanwhile = [&] { ++calls; };
    const Tiles::Scope scope;
    if (add) Tiles::product<true>({a, a_next, a_other}, {b, b_next, b_other}, depth, sums, stride, meanwhile);
    else Tiles::product<false>({a, a_next, a_other}, {b, b_next, b_other}, depth, sums, stride, meanwhile);
    return calls;
}

// 32 floats to bfloat16, in a row and as pairs of number i and number 16 + i.
void convert(const float* from, BFloat* row, BFloat* pairs) {
    const Lanes low = load_lanes(from), high = load_lanes(from + kLanes);
    store_pairs(row, to_bfloat16(low, high));
    store_pairs(pairs, to_pairs(low, high));
}

// (16, 16), in place.
void transpose_lanes(float* rows) {
    Lanes lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = load_lanes(rows + i * kLanes);
    transpose(lanes);
    for (int i = 0; i < kLanes; ++i) store_lanes(rows + i * kLanes, lanes[i]);
}

#if defined(__AMX_BF16__)
// Whether a scope gives tile registers back as it found them: configured by somebody else, then by nobody.
int scope_gives_back() {
    struct alignas(64) Configuration {
        uint8_t bytes[64];
    } theirs = {}, found;
    theirs.bytes[0] = 1;     // palette
    theirs.bytes[16] = 12;   // bytes of a row of tile 0
    theirs.bytes[48] = 5;    // rows of tile 0
    _tile_loadconfig(&theirs);
    { const AmxTiles::Scope scope; }
    _tile_storeconfig(&found);
    const bool same = !std::memcmp(&found, &theirs, sizeof found);
    _tile_release();
    { const AmxTiles::Scope scope; }
    _tile_storeconfig(&found);
    return same && found.bytes[0] == 0;
}
#endif
}
