#pragma once

#include <cstdlib>
#include <memory>
#include <new>

namespace antkv {

struct Free {
    void operator()(void* data) const { std::free(data); }
};
using Buffer = std::unique_ptr<float[], Free>;

// Floats at a cache line's start, not initialised.
inline Buffer floats(size_t count) {
    void* data = std::aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (!data) throw std::bad_alloc();
    return Buffer((float*)data);
}

}  // namespace antkv
