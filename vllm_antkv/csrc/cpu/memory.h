#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstdio>
#include <memory>
#include <vector>

namespace antkv {

struct Free {
    void operator()(void* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<float[], Free>;

// At a cache line's start, not initialised. No exception may reach Python through the C interface, or leave a thread.
inline void* allocate(size_t bytes) {
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!data) std::fprintf(stderr, "antkv: no memory for %zu bytes.\n", bytes), std::abort();
    return data;
}
inline Buffer floats(size_t count) { return Buffer((float*)allocate(count * sizeof(float))); }

// A std::vector that throws nothing where there is no memory.
template <typename T>
struct Allocator {
    using value_type = T;
    Allocator() = default;
    template <typename U>
    Allocator(const Allocator<U>&) {}
    T* allocate(size_t count) { return (T*)antkv::allocate(count * sizeof(T)); }
    void deallocate(T* data, size_t) { std::free(data); }
    bool operator==(const Allocator&) const { return true; }
    bool operator!=(const Allocator&) const { return false; }
};
template <typename T>
using Vector = std::vector<T, Allocator<T>>;

// Brings memory into the caches. Loads, as prefetches are dropped where there are many; the compiler takes what is loaded to
// be used.
inline void read_ahead(const void* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) asm volatile("" ::"r"(((const uint8_t*)from)[i]));
}

}  // namespace antkv
