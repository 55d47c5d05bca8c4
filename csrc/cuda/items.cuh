// The work of a launch, found on the device: splits of the requests that compute a single token.
#pragma once

#include "layer.cuh"

// 0 for requests with more queries, and for the padding of a CUDA graph.
ANTKV_DEVICE int num_splits(const Layer& layer, const Step& step, int request) {
    if (step.query_start_loc[request + 1] - step.query_start_loc[request] != 1) return 0;
    return (step.seq_lens[request] + layer.split - 1) / layer.split;
}

// Walks the splits of all requests in order; every warp walks alone and finds the same.
struct Items {
    int before = 0;         // splits of the requests before `first_request`
    int first_request = 0;  // of the 32 that are looked at together
    int request = 0, split = 0;

    // Find item number `item`, which must not be before the last one found. False when there are fewer.
    ANTKV_DEVICE bool find(const Layer& layer, const Step& step, int item, int lane) {
        for (; first_request < step.num_reqs; first_request += kWarp) {
            const int candidate = first_request + lane;
            const int own = candidate < step.num_reqs ? num_splits(layer, step, candidate) : 0;
            int upto = own;
            for (int distance = 1; distance < kWarp; distance *= 2) {
                const int other = from_lane(upto, lane < distance ? lane : lane - distance);
                if (lane >= distance) upto += other;
            }
            if (const u32 hits = ballot_warp(item < before + upto)) {
                const int hit = first_bit(hits);
                request = first_request + hit;
                split = item - before - from_lane(upto - own, hit);
                return true;
            }
            before += from_lane(upto, kWarp - 1);
        }
        return false;
    }
};
