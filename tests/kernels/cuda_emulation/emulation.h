// A CUDA device on one CPU thread: what csrc/cuda/device.cuh asks of the machine, in exact C++.
//
// scheduler.h has the threads, barriers.h what compute capability 9.0 adds. Copies of `copy16_async` land when they are
// waited for, and no sooner, so that a missing wait shows.
#pragma once

#include "standard.h"

#define ANTKV_KERNEL(...) extern "C" void
#define ANTKV_DEVICE inline
#define ANTKV_GLOBAL
#define ANTKV_ARGUMENT(type) const type
#define ANTKV_DYNAMIC_SHARED(name) u8* name = emulation::block->shared
#define ANTKV_INFINITY INFINITY
#define threadIdx (emulation::thread->index)
#define blockIdx (emulation::block->index)
#define gridDim (emulation::block->grid)

struct dim3 {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    u32 x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) uint4 {
    u32 x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
using std::min;

#include "scheduler.h"

namespace emulation {

ANTKV_MACHINE float bits_to_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
ANTKV_MACHINE u16 to_bf16(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
ANTKV_MACHINE u16 to_f16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace emulation

ANTKV_MACHINE float f16_to_float(u16 half) { return _cvtsh_ss(half); }
ANTKV_MACHINE float bf16_to_float(u16 half) { return emulation::bits_to_float((u32)half << 16); }
ANTKV_MACHINE u32 pack_f16(float first, float second) {
    return emulation::to_f16(first) | (u32)emulation::to_f16(second) << 16;
}
ANTKV_MACHINE u32 pack_bf16(float first, float second) {
    return emulation::to_bf16(first) | (u32)emulation::to_bf16(second) << 16;
}
ANTKV_MACHINE float fma_f16(u16 a, u16 b, u16 c) {
    return (float)((double)f16_to_float(a) * f16_to_float(b) + f16_to_float(c));
}
ANTKV_MACHINE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    const float first = fma_f16((u16)a, (u16)b, (u16)c);
    return pack_f16(first, fma_f16((u16)(a >> 16), (u16)(b >> 16), (u16)(c >> 16)));
}
ANTKV_MACHINE u32 mul_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, 0x80008000u); }
ANTKV_MACHINE u32 neg_f16x2(u32 a) { return a ^ 0x80008000u; }
constexpr float kFp8Unit = 256;
inline void widen_e4m3x4(u32 word, u32& low, u32& high) {
    const auto one = [=](int at) { return (word >> at & 0x80) << 8 | (word >> at & 0x7f) << 7; };
    low = one(0) | one(8) << 16;
    high = one(16) | one(24) << 16;
}
inline const u8* behind(const u8* at, u32 count, u32 size) { return at + (u64)count * size; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal(float x) { return 1 / x; }
inline float square_root(float x) { return std::sqrt(x); }

namespace emulation {

struct Operands {
    float a[8], b[4];
};

template <float (*kWiden)(u16)>
ANTKV_MACHINE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Operands own;
    for (int i = 0; i < 8; ++i) own.a[i] = kWiden((u16)(a[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; ++i) own.b[i] = kWiden((u16)((i / 2 ? b1 : b0) >> i % 2 * 16));
    const auto* shown = show(own);
    const int row = lane() / 4, column = lane() % 4 * 2;
    for (int i = 0; i < 4; ++i) {
        double sum = c[i];
#pragma GCC unroll 4
        for (int lane = 0; lane < 4; ++lane) {
            const auto& left = *(const Operands*)shown[row * 4 + lane];
            const auto& right = *(const Operands*)shown[(column + i % 2) * 4 + lane];
            // Registers of A: rows 0-7 and 8-15 of the first 8 channels, then of the others.
#pragma GCC unroll 4
            for (int k = 0; k < 4; ++k) sum += (double)left.a[k / 2 * 4 + i / 2 * 2 + k % 2] * right.b[k];
        }
        c[i] = (float)sum;
    }
}

}  // namespace emulation

inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulation::mma<f16_to_float>(c, a, b0, b1); }
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { emulation::mma<bf16_to_float>(c, a, b0, b1); }

template <typename T>
T load_constant(const T* at) {
    if ((size_t)at % alignof(T)) {
        std::fprintf(stderr, "a load of %zu bytes is not aligned\n", sizeof(T));
        std::abort();
    }
    return *at;
}

inline void add_to(float* at, float x) { *at += x; }
inline u32 count_round(u32* at, u32 most) {
    const u32 before = *at;
    *at = before >= most ? 0 : before + 1;
    return before;
}
ANTKV_MACHINE void set_flag(i32* at) { *at = 1; }

inline void copy16_async(void* shared, const void* global) {
    if (((size_t)shared | (size_t)global) % 16) {
        std::fprintf(stderr, "a copy of 16 bytes is not aligned\n");
        std::abort();
    }
    emulation::thread->copies.back().push_back({shared, global});
}
inline void commit_copies() { emulation::thread->copies.emplace_back(); }
template <int kPending>
void wait_for_copies() {
    auto& groups = emulation::thread->copies;
    while (groups.size() > kPending + 1) {
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

ANTKV_MACHINE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    u32 word = 0;
    for (int i = 0; i < 4; ++i) word |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return word;
}
inline void sync_block() { emulation::meet(emulation::block->meeting); }
inline void sync_warp() { emulation::meet(emulation::warp().meeting); }
template <typename T>
ANTKV_MACHINE T from_lane(T value, int lane) {
    return emulation::read<T>(emulation::show(value)[lane]);
}
template <typename T>
T from_lane_xor(T value, int mask) {
    return from_lane(value, emulation::lane() ^ mask);
}
ANTKV_MACHINE u32 ballot_warp(bool condition) {
    const auto* shown = emulation::show(condition);
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (u32)emulation::read<bool>(shown[lane]) << lane;
    return mask;
}
template <typename T>
T opaque(T x) {
    return x;
}
inline int first_bit(u32 mask) { return __builtin_ctz(mask); }

#include "barriers.h"
