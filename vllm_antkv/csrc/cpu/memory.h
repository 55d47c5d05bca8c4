#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstdio>
#include <memory>

namespace antkv {

struct Free {
    void operator()(void* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<float[], Free>;

// Floats at a cache line's start, not initialised.
inline Buffer floats(size_t count) {
    void* data = std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    // No exception may reach Python through the C interface.
    if (!data) std::fprintf(stderr, "antkv: no memory for %zu bytes.\n", count * sizeof(float)), std::abort();
    return Buffer((float*)data);
}

// Brings memory into the caches. Loads, as prefetches are dropped where there are many; the compiler takes what is loaded to
// be used.
inline void read_ahead(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) asm volatile("" ::"r"(((const uint8_t*)from)[i]));
}

}  // namespace antkv
