// A small kernel for what larger ones are built of, and for the checks that watch over them.
#include "device.cuh"

// A producer warp brings pages through a ring; the other warps add up what is in them.
namespace stream {
constexpr int kRing = 3, kPage = 512, kConsumers = 64, kThreads = kConsumers + kWarp;
struct Shared {
    alignas(16) u32 pages[kRing][kPage];
    Barrier full[kRing], empty[kRing];
    u32 sums[kConsumers];
};
}  // namespace stream

// Grid: (blocks). in: (blocks, num_pages, kPage). out: (blocks), each block's sum.
ANTKV_KERNEL(stream::kThreads)
stream_pages(const u32* in, u32* out, int num_pages) {
    using namespace stream;
    ANTKV_DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int thread = (int)threadIdx.x;
    if (thread == 0) {
        for (int i = 0; i < kRing; ++i) {
            make_barrier(&shared.full[i], 1);
            make_barrier(&shared.empty[i], kConsumers / kWarp);
        }
        publish_barriers();
    }
    // What lies in the ring before pages do is written in the ordinary way.
    for (int at = thread; at < kRing * kPage; at += kThreads) ((u32*)shared.pages)[at] = 0;
    fence_before_bulk_copies();
    sync_block();
    const u32* pages = in + (i64)blockIdx.x * num_pages * kPage;
    if (thread >= kConsumers) {
        if (thread != kConsumers) return;
        for (int page = 0; page < num_pages; ++page) {
            const int slot = page % kRing;
            wait(&shared.empty[slot], page / kRing % 2 ^ 1);
            arrive_expecting(&shared.full[slot], sizeof shared.pages[slot]);
            copy_bulk(shared.pages[slot], pages + page * kPage, sizeof shared.pages[slot], &shared.full[slot]);
        }
        return;
    }
    u32 sum = 0;
    for (int page = 0; page < num_pages; ++page) {
        const int slot = page % kRing;
        wait(&shared.full[slot], page / kRing % 2);
        for (int at = thread; at < kPage; at += kConsumers) sum += shared.pages[slot][at];
        sync_warp();
        if (thread % kWarp == 0) arrive(&shared.empty[slot]);
    }
    shared.sums[thread] = sum;
    sync_threads<kConsumers>(1);
    if (thread) return;
    for (int i = 1; i < kConsumers; ++i) sum += shared.sums[i];
    out[blockIdx.x] = sum;
}
