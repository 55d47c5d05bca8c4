// When a warp came to what: the time of a CTA as the kernel itself sees it, in builds with ANTKV_STAMPS.
//
// In all others this is nothing, in machine code too. benchmarks/gpu/stamps.py reads what is written.
#pragma once

#include "lanes.cuh"

constexpr bool kStamps = ANTKV_STAMPS;
constexpr int kStampedBlocks = 4, kStampsOfWarp = 256;  // of KV head 0, the first of them; more stamps are dropped

// What begins, in the order of `PHASES` there.
enum class Phase : u64 {
    kStart = 1,
    kTables,
    kAngles,
    kWait,
    kLogits,
    kKeptKeys,
    kWeights,
    kKeptValues,
    kValues,
    kMerge,
    // Of the warp that brings spans.
    kSplit,
    kRoom,
    kBring,
    kVotes,
    kEnd
};

struct Stamps {
    u64 *next = nullptr, *end = nullptr;

    ANTKV_DEVICE Stamps(const Results& results, Lane lane, int warp) {
        if constexpr (kStamps) {
            if (blockIdx.y || blockIdx.x >= kStampedBlocks || lane.index) return;
            next = results.stamps + ((int)blockIdx.x * (kWarps + 1) + warp) * kStampsOfWarp;
            end = next + kStampsOfWarp;
        }
    }

    ANTKV_DEVICE void mark(Phase phase) {
        if constexpr (kStamps) {
            if (next < end) *next++ = clock_now() << 8 | (u64)phase;
        }
    }
};
