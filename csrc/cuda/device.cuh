// What the kernels ask of the machine, one small function each. The tests put an emulation in its place.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i16 = short;
using i32 = int;
using i64 = long long;

#ifdef ANTKV_EMULATION
#include "emulation.h"
#else

#define ANTKV_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define ANTKV_DEVICE __device__ __forceinline__
// A structure passed by value and read where the launch has put it.
#define ANTKV_ARGUMENT(type) const __grid_constant__ type
#define ANTKV_DYNAMIC_SHARED(name) extern __shared__ __align__(16) u8 name[]
#define ANTKV_INFINITY __int_as_float(0x7f800000)

// Two rows of 16 bits in a word: the first in the lower half.
ANTKV_DEVICE u32 pack_f16(float first, float second) {
    u32 word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
ANTKV_DEVICE u32 pack_bf16(float first, float second) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
    return word;
}
ANTKV_DEVICE float f16_to_float(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
ANTKV_DEVICE float bf16_to_float(u16 half) { return __uint_as_float((u32)half << 16); }

ANTKV_DEVICE u32 mul_f16x2(u32 a, u32 b) {
    u32 word;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
    return word;
}
ANTKV_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    u32 word;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(c));
    return word;
}
ANTKV_DEVICE u32 neg_f16x2(u32 a) {
    u32 word;
    asm("neg.f16x2 %0, %1;" : "=r"(word) : "r"(a));
    return word;
}
ANTKV_DEVICE float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

// c (16, 8) += a (16, 16) b (16, 8), spread over a warp as the PTX manual shows for mma.m16n8k16. Volatile, lest it be
// moved to where only the lanes that use the result would run it.
ANTKV_DEVICE void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
ANTKV_DEVICE void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Global memory that nobody writes while the kernel runs.
template <typename T>
ANTKV_DEVICE T load_constant(const T* at) {
    return __ldg(at);
}

// Global memory. Volatile, lest the load be moved to where its result is used.
ANTKV_DEVICE u32 load_global(const u16* at) {
    u16 value;
    asm volatile("ld.global.b16 %0, [%1];" : "=h"(value) : "l"(at));
    return value;
}
ANTKV_DEVICE u32 load_global(const u32* at) {
    u32 value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(at));
    return value;
}
ANTKV_DEVICE uint2 load_global(const uint2* at) {
    uint2 value;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(at));
    return value;
}

// 16 bytes from global to shared memory, past the registers.
ANTKV_DEVICE void copy16_async(void* shared, const void* global) {
    const u32 to = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
ANTKV_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of the committed groups are under way.
template <int kPending>
ANTKV_DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

ANTKV_DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }
ANTKV_DEVICE void sync_block() { __syncthreads(); }
ANTKV_DEVICE void sync_warp() { __syncwarp(); }
ANTKV_DEVICE u32 ballot_warp(bool condition) { return __ballot_sync(0xffffffffu, condition); }
template <typename T>
ANTKV_DEVICE T from_lane(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
ANTKV_DEVICE T from_lane_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
ANTKV_DEVICE int first_bit(u32 mask) { return __ffs((int)mask) - 1; }
ANTKV_DEVICE float logarithm(float x) { return __logf(x); }

#endif

constexpr int kWarp = 32;

ANTKV_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
ANTKV_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

ANTKV_DEVICE float largest_of_warp(float x) {
    for (int mask = kWarp / 2; mask; mask /= 2) x = fmaxf(x, from_lane_xor(x, mask));
    return x;
}
ANTKV_DEVICE float sum_of_warp(float x) {
    for (int mask = kWarp / 2; mask; mask /= 2) x += from_lane_xor(x, mask);
    return x;
}
