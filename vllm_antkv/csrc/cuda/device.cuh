// What the kernels ask of the machine, one small function each. The tests put an emulation in its place.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using i16 = short;
using i32 = int;
using i64 = long long;
using u64 = unsigned long long;

// In shared memory. A phase of it is over when as many threads as it was made for have arrived and all bytes that they
// announced have come; the first phase has parity 0, the next 1, then 0 again.
struct alignas(8) Barrier {
    u64 word;
};

// In builds with ANTKV_CHECK a condition that does not hold ends the kernel and names its line; else it costs nothing.
#if defined(ANTKV_EMULATION)
#define ANTKV_EXPECT(condition) ((condition) ? (void)0 : emulation::unexpected(#condition, __FILE__, __LINE__))
#elif defined(ANTKV_CHECK)
#ifndef __CUDACC_RTC__
#include <cstdio>
#endif
#define ANTKV_EXPECT(condition)                                                                                \
    do {                                                                                                       \
        if (!(condition)) {                                                                                    \
            printf("%s:%d: %s does not hold (block %d, %d, thread %d)\n", __FILE__, __LINE__, #condition,      \
                   (int)blockIdx.x, (int)blockIdx.y, (int)threadIdx.x);                                        \
            asm volatile("trap;");                                                                             \
        }                                                                                                      \
    } while (0)
#else
#define ANTKV_EXPECT(condition) ((void)0)
#endif

#ifdef ANTKV_EMULATION
#include "emulation.h"
#else

#define ANTKV_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)
#define ANTKV_DEVICE __device__ __forceinline__
#define ANTKV_GLOBAL __device__
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
// Four e4m3 numbers in float16, of `kFp8Unit` times less.
#if __CUDA_ARCH__ >= 890
constexpr float kFp8Unit = 1;
ANTKV_DEVICE void widen_e4m3x4(u32 word, u32& low, u32& high) {
    asm("{\n.reg .b16 first, second;\nmov.b32 {first, second}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, first;\ncvt.rn.f16x2.e4m3x2 %1, second;\n}"
        : "=r"(low), "=r"(high)
        : "r"(word));
}
#else
constexpr float kFp8Unit = 256;
// The exponent is moved, not rebiased.
ANTKV_DEVICE void widen_e4m3x4(u32 word, u32& low, u32& high) {
    const u32 first = __byte_perm(word, 0, 0x1404), second = __byte_perm(word, 0, 0x3424);
    low = (first & 0x80008000u) | (first & 0x7f007f00u) >> 1;
    high = (second & 0x80008000u) | (second & 0x7f007f00u) >> 1;
}
#endif
ANTKV_DEVICE float exp2_fast(float x) {
    float value;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}

ANTKV_DEVICE float reciprocal(float x) {
    float value;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
    return value;
}
ANTKV_DEVICE float square_root(float x) {
    float value;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
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

// Nobody waits for it. Exact where no other thread adds there meanwhile.
ANTKV_DEVICE void add_to(float* at, float x) { atomicAdd(at, x); }
// Counts to `most`, then begins at 0 again; how many counted before. Who counts later sees what this CTA wrote before its
// threads met, and this one what those before it wrote.
ANTKV_DEVICE u32 count_round(u32* at, u32 most) {
    __threadfence();
    const u32 before = atomicInc(at, most);
    __threadfence();
    return before;
}
// Other threads may do so meanwhile.
ANTKV_DEVICE void set_flag(i32* at) { asm volatile("st.relaxed.gpu.s32 [%0], 1;" ::"l"(at) : "memory"); }

// `count` times `size` bytes behind `at`, in one instruction.
ANTKV_DEVICE const u8* behind(const u8* at, u32 count, u32 size) {
    const u8* place;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(place) : "r"(count), "r"(size), "l"(at));
    return place;
}

ANTKV_DEVICE u32 shared_address(const void* shared) { return (u32)__cvta_generic_to_shared(shared); }

// 16 bytes from global to shared memory, past the registers.
ANTKV_DEVICE void copy16_async(void* shared, const void* global) {
    const u32 to = shared_address(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
ANTKV_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` of the committed groups are under way.
template <int kPending>
ANTKV_DEVICE void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Looks at the lowest three of each four bits of the selector, in its lower half.
ANTKV_DEVICE u32 permute_bytes(u32 a, u32 b, u32 selector) {
    u32 word;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(a), "r"(b), "r"(selector));
    return word;
}
// The same number, of which the compiler knows nothing more: what seldom runs and is computed from it keeps no registers.
template <typename T>
ANTKV_DEVICE T opaque(T x) {
    asm volatile("" : "+r"(x));
    return x;
}
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

ANTKV_DEVICE void make_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
ANTKV_DEVICE void arrive(Barrier* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}
// An arrival of this thread, as soon as all that it has copied 16 bytes at a time has come.
ANTKV_DEVICE void arrive_when_copied(Barrier* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Until the phase of this parity is over, or if the one before the current has it: a new barrier passes parity 1.
ANTKV_DEVICE void wait(Barrier* barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
#define ANTKV_TRY_WAIT "mbarrier.try_wait.parity"
#else
#define ANTKV_TRY_WAIT "mbarrier.test_wait.parity"
#endif
    asm volatile("{\n.reg .pred over;\nagain:\n" ANTKV_TRY_WAIT
                 ".shared::cta.b64 over, [%0], %1;\n@!over bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
                 : "memory");
}
// Between making barriers and the meeting after which others use them, bulk copies among them.
ANTKV_DEVICE void publish_barriers() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// --- From compute capability 9.0 on.

// Announces bytes, which must be done before their copies are started.
ANTKV_DEVICE void arrive_expecting(Barrier* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
// Between ordinary writes to shared memory and the meeting after which bulk copies read or overwrite it.
ANTKV_DEVICE void fence_before_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// By one thread. Addresses and `bytes` are multiples of 16; the bytes count at the barrier when they have come.
ANTKV_DEVICE void copy_bulk(void* shared, const void* global, u32 bytes, Barrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// Some warps of a block meet, `kThreads` threads together; name 0 is `sync_block`'s.
template <int kThreads>
ANTKV_DEVICE void sync_threads(int name) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "n"(kThreads) : "memory");
}

#endif

constexpr int kWarp = 32;

ANTKV_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
ANTKV_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// Of each of several numbers, step by step together: a shuffle takes longer than all of a step's.
template <int kCount>
ANTKV_DEVICE void largest_of_warp(float (&x)[kCount]) {
    for (int mask = kWarp / 2; mask; mask /= 2)
        for (int i = 0; i < kCount; ++i) x[i] = fmaxf(x[i], from_lane_xor(x[i], mask));
}
template <int kCount>
ANTKV_DEVICE void sums_of_warp(float (&x)[kCount]) {
    for (int mask = kWarp / 2; mask; mask /= 2)
        for (int i = 0; i < kCount; ++i) x[i] += from_lane_xor(x[i], mask);
}
