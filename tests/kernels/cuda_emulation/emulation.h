// A CUDA device on one CPU thread: what csrc/cuda/device.cuh asks of the machine, in exact C++.
//
// Threads of a CTA are fibers. Shared memory starts as NaN; asynchronous copies land when they are waited for, and no
// sooner, so that a missing wait shows.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#define ANTKV_KERNEL(threads) extern "C" void
#define ANTKV_DEVICE inline
#define ANTKV_ARGUMENT(type) const type
#define ANTKV_DYNAMIC_SHARED(name) u8* name = emulation::block->shared.get()
#define ANTKV_INFINITY INFINITY
#define threadIdx (emulation::block->current->thread)
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

// Keep the registers that a call keeps on the old stack, go on with the new one. (swapcontext asks the kernel, twice.)
extern "C" void emulation_switch(void** old_stack, void* new_stack);
asm(R"(
.weak emulation_switch
emulation_switch:
    push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
    ret
)");

namespace emulation {

constexpr int kWarpSize = 32;
constexpr int kStack = 1 << 17;

struct Copy {
    void* to;
    const void* from;
};

// Something that threads meet at.
struct Meeting {
    int size, arrived = 0;
    unsigned generation = 0;
};

struct Thread {
    struct {
        unsigned x;
    } thread;
    void* stack = nullptr;  // where it goes on
    Meeting* waits_for = nullptr;
    unsigned seen = 0, exchanges = 0;
    bool done = false;
    std::vector<std::vector<Copy>> copies;  // groups; the last is not committed

    bool can_run() const { return !done && (!waits_for || waits_for->generation != seen); }
};

// What the lanes of a warp show each other; two buffers, so that one meeting per exchange is enough.
struct Warp {
    Meeting meeting{kWarpSize};
    alignas(16) u8 shown[2][kWarpSize][64];
};

struct Block {
    dim3 index, grid;
    std::unique_ptr<u8[], void (*)(void*)> shared{nullptr, std::free};
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    Meeting meeting{0};
    Thread* current = nullptr;
    void* launcher;  // its stack
    std::function<void()> kernel;

    Warp& warp() { return warps[current->thread.x / kWarpSize]; }
    int lane() const { return (int)current->thread.x % kWarpSize; }
};

inline Block* block = nullptr;

// Go on with the next thread that can.
inline void yield() {
    Thread* from = block->current;
    const size_t count = block->threads.size();
    for (size_t step = 1; step <= count; ++step) {
        Thread& next = block->threads[(from->thread.x + step) % count];
        if (!next.can_run()) continue;
        block->current = &next;
        if (&next != from) emulation_switch(&from->stack, next.stack);
        return;
    }
    for (const Thread& thread : block->threads) {
        if (thread.done) continue;
        std::fprintf(stderr, "thread %u waits for threads that do not come\n", thread.thread.x);
        std::abort();
    }
    emulation_switch(&from->stack, block->launcher);
}

inline void meet(Meeting& meeting) {
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    block->current->waits_for = &meeting;
    block->current->seen = meeting.generation;
    yield();
    block->current->waits_for = nullptr;
}

// Show a value to the warp; what all of its lanes have shown.
template <typename T>
const u8 (*show(const T& value))[64] {
    static_assert(sizeof(T) <= 64);
    auto& shown = block->warp().shown[block->current->exchanges++ % 2];
    std::memcpy(shown[block->lane()], &value, sizeof value);
    meet(block->warp().meeting);
    return shown;
}
template <typename T>
T read(const u8 (&shown)[64]) {
    T value;
    std::memcpy(&value, shown, sizeof value);
    return value;
}

inline void enter() {
    block->kernel();
    block->current->done = true;
    yield();
}

inline void run_block(Block& b) {
    static std::vector<u8> stacks;
    stacks.resize(b.threads.size() * kStack);
    block = &b;
    for (unsigned x = 0; x < b.threads.size(); ++x) {
        Thread& thread = b.threads[x];
        thread.thread.x = x;
        thread.copies.resize(1);
        // Six registers, the function to return to, and a place for its own return address, as the ABI aligns them.
        void** top = (void**)((size_t)(stacks.data() + (x + 1) * kStack) & ~(size_t)15) - 2;
        *top = (void*)enter;
        thread.stack = top - 6;
    }
    b.current = &b.threads[0];
    emulation_switch(&b.launcher, b.current->stack);
}

// Grid (3), threads of a CTA, bytes of shared memory.
inline void launch(const int* sizes, std::function<void()> kernel) {
    const dim3 grid{(unsigned)sizes[0], (unsigned)sizes[1], (unsigned)sizes[2]};
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                Block b;
                b.index = {x, y, z};
                b.grid = grid;
                const size_t bytes = (sizes[4] + 127) / 128 * 128 + 128;
                b.shared.reset((u8*)std::aligned_alloc(128, bytes));
                std::memset(b.shared.get(), 0xff, bytes);
                b.threads = std::vector<Thread>(sizes[3]);
                b.warps = std::vector<Warp>((sizes[3] + kWarpSize - 1) / kWarpSize);
                b.meeting.size = sizes[3];
                b.kernel = kernel;
                run_block(b);
            }
}

inline float bits_to_float(u32 bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline u16 to_bf16(float value) {
    u32 bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return 0x7fff;
    return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline u16 to_f16(float value) { return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

}  // namespace emulation

inline float f16_to_float(u16 half) { return _cvtsh_ss(half); }
inline float bf16_to_float(u16 half) { return emulation::bits_to_float((u32)half << 16); }
inline u32 pack_f16(float first, float second) {
    return emulation::to_f16(first) | (u32)emulation::to_f16(second) << 16;
}
inline u32 pack_bf16(float first, float second) {
    return emulation::to_bf16(first) | (u32)emulation::to_bf16(second) << 16;
}
inline u32 fma_f16x2(u32 a, u32 b, u32 c) {
    const auto one = [=](int shift) {
        const double product = (double)f16_to_float((u16)(a >> shift)) * f16_to_float((u16)(b >> shift));
        return (float)(product + f16_to_float((u16)(c >> shift)));
    };
    return pack_f16(one(0), one(16));
}
inline u32 mul_f16x2(u32 a, u32 b) { return fma_f16x2(a, b, 0x80008000u); }
inline u32 neg_f16x2(u32 a) { return a ^ 0x80008000u; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float logarithm(float x) { return std::log(x); }

namespace emulation {

struct Operands {
    float a[8], b[4];
};

template <float (*kWiden)(u16)>
void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Operands own;
    for (int i = 0; i < 8; ++i) own.a[i] = kWiden((u16)(a[i / 2] >> i % 2 * 16));
    for (int i = 0; i < 4; ++i) own.b[i] = kWiden((u16)((i / 2 ? b1 : b0) >> i % 2 * 16));
    const auto* shown = show(own);
    const int row = block->lane() / 4, column = block->lane() % 4 * 2;
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

inline u32 load_global(const u16* at) { return load_constant(at); }
inline u32 load_global(const u32* at) { return load_constant(at); }
inline uint2 load_global(const uint2* at) { return load_constant(at); }

inline void copy16_async(void* shared, const void* global) {
    if (((size_t)shared | (size_t)global) % 16) {
        std::fprintf(stderr, "a copy of 16 bytes is not aligned\n");
        std::abort();
    }
    emulation::block->current->copies.back().push_back({shared, global});
}
inline void commit_copies() { emulation::block->current->copies.emplace_back(); }
template <int kPending>
void wait_for_copies() {
    auto& groups = emulation::block->current->copies;
    while (groups.size() > kPending + 1) {
        for (const auto& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const unsigned long long bytes = (unsigned long long)b << 32 | a;
    u32 word = 0;
    for (int i = 0; i < 4; ++i) word |= (u32)(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return word;
}
inline void sync_block() { emulation::meet(emulation::block->meeting); }
inline void sync_warp() { emulation::meet(emulation::block->warp().meeting); }
template <typename T>
T from_lane(T value, int lane) {
    return emulation::read<T>(emulation::show(value)[lane]);
}
template <typename T>
T from_lane_xor(T value, int mask) {
    return from_lane(value, emulation::block->lane() ^ mask);
}
inline u32 ballot_warp(bool condition) {
    const auto* shown = emulation::show(condition);
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (u32)emulation::read<bool>(shown[lane]) << lane;
    return mask;
}
inline int first_bit(u32 mask) { return __builtin_ctz(mask); }
