// Kernels that measure, each, one constant of research/sm_model/constants.py: `out` has a number of cycles, or of bytes a
// cycle, for each CTA. Loops are unrolled, so that what they count costs next to nothing.
#include "device.cuh"

namespace {

ANTKV_DEVICE u32 now() {
    u32 clock;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(clock)::"memory");
    return clock;
}

}  // namespace

// mma.sync of eight warps, two per scheduler, which depend on each other as far apart as possible: cycles of one.
ANTKV_KERNEL(256) mma_interval(float* out, int rounds) {
    float sums[8][4] = {};
    const u32 lane = threadIdx.x, a[4] = {lane, lane * 3, lane * 5, lane * 7};
    sync_block();
    const u32 begin = now();
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int i = 0; i < 8; ++i) mma_f16(sums[i], a, lane, lane);
    const u32 end = now();
    float total = 0;
    for (int i = 0; i < 8; ++i) total += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    if (threadIdx.x == 0) out[blockIdx.x] = (float)(end - begin) / (float)(rounds * 16);
    if (total == 1234.5f) out[blockIdx.x] = total;
}

// fma.rn.f16x2 of eight warps: cycles of one.
ANTKV_KERNEL(256) half_interval(float* out, int rounds) {
    u32 sums[16];
    for (int i = 0; i < 16; ++i) sums[i] = threadIdx.x + i;
    sync_block();
    const u32 begin = now();
    for (int round = 0; round < rounds; ++round)
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i] = fma_f16x2(sums[i], 0x3c013c01, 0x2c002c00);
    const u32 end = now();
    u32 total = 0;
    for (int i = 0; i < 16; ++i) total ^= sums[i];
    if (threadIdx.x == 0) out[blockIdx.x] = (float)(end - begin) / (float)(rounds * 32);
    if (total == 0x12345678) out[blockIdx.x] = 0;
}

// A chain of loads, each of which says where the next one is: cycles of one. All lanes ask for the same. `next` has as many words as it takes to be
// in L1, in L2 or in neither.
ANTKV_KERNEL(32) load_latency(float* out, int rounds, const u32* next) {
    u32 at = 0;
    for (int round = 0; round < rounds; ++round) at = next[at];
    const u32 begin = now();
    for (int round = 0; round < rounds; ++round) at = next[at];
    const u32 end = now();
    out[blockIdx.x] = at == ~0u ? 0 : (float)(end - begin) / (float)rounds;
}

// Whole sectors of 32 bytes from random places, four lanes to one: bytes a cycle of a multiprocessor. `num_sectors` is a
// power of two.
ANTKV_KERNEL(256) sector_rate(float* out, int rounds, const uint2* from, u32 num_sectors) {
    u32 seed = (blockIdx.x * 256 + threadIdx.x) / 4 * 2654435761u + 12345, total = 0;
    sync_block();
    const u32 begin = now();
    for (int round = 0; round < rounds; ++round) {
        uint2 found[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            seed = seed * 1664525u + 1013904223u;
            found[i] = load_constant(from + (i64)((seed >> 8) & (num_sectors - 1)) * 4 + threadIdx.x % 4);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) total ^= found[i].x ^ found[i].y;
    }
    sync_block();
    const u32 end = now();
    if (threadIdx.x == 0) out[blockIdx.x] = (float)rounds * 8 * 256 * 8 / (float)(end - begin);
    if (total == 0x12345678) out[blockIdx.x] = 0;
}

// 16 bytes of every lane from lines of their own, which stay in L1: lines a cycle. `num_lines` is a power of two.
ANTKV_KERNEL(256) l1_lines(float* out, int rounds, const uint4* from, u32 num_lines) {
    u32 line = threadIdx.x * 5, total = 0;
    for (u32 at = threadIdx.x; at < num_lines; at += 256) total += load_constant(from + at * 8).x;
    sync_block();
    const u32 begin = now();
    for (int round = 0; round < rounds; ++round) {
        uint4 found[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) found[i] = load_constant(from + ((line += 7) & (num_lines - 1)) * 8);
#pragma unroll
        for (int i = 0; i < 8; ++i) total ^= found[i].x ^ found[i].y ^ found[i].z ^ found[i].w;
    }
    sync_block();
    const u32 end = now();
    if (threadIdx.x == 0) out[blockIdx.x] = (float)rounds * 8 * 256 / (float)(end - begin);
    if (total == 0x12345678) out[blockIdx.x] = 0;
}

// Bulk copies of pages from random places, several under way: bytes a cycle of a multiprocessor.
ANTKV_KERNEL(32) page_rate(float* out, int rounds, const u8* from, u32 num_pages, u32 page_bytes) {
    constexpr int kRing = 6;
    ANTKV_DYNAMIC_SHARED(memory);
    Barrier* full = (Barrier*)memory;
    u8* ring = memory + 64;
    if (threadIdx.x) return;
    for (int i = 0; i < kRing; ++i) make_barrier(full + i, 1);
    publish_barriers();
    u32 seed = blockIdx.x * 2654435761u + 1;
    const u32 begin = now();
    for (int round = 0; round < rounds + kRing; ++round) {
        const int slot = round % kRing;
        if (round >= kRing) wait(full + slot, (round / kRing - 1) % 2);
        if (round >= rounds) continue;
        seed = seed * 1664525u + 1013904223u;
        arrive_expecting(full + slot, page_bytes);
        copy_bulk(ring + slot * page_bytes, from + (i64)((seed >> 4) % num_pages) * page_bytes, page_bytes, full + slot);
    }
    const u32 end = now();
    out[blockIdx.x] = (float)rounds * (float)page_bytes / (float)(end - begin);
}
