// The work of a launch, found on the device: splits of the requests that compute a single token.
#pragma once

#include "layer.cuh"

// 0 for requests with more queries, and for the padding of a CUDA graph.
ANTKV_DEVICE int num_splits_of(const Layer& layer, const Step& step, int request) {
    if (step.query_start_loc[request + 1] - step.query_start_loc[request] != 1) return 0;
    return (step.seq_lens[request] + layer.split - 1) / layer.split;
}

// The sum of `own` over this lane and those before it.
ANTKV_DEVICE int sum_upto(int own, int lane) {
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const int other = from_lane(own, lane < distance ? lane : lane - distance);
        if (lane >= distance) own += other;
    }
    return own;
}

// Walks the splits of all requests in order; every warp walks alone and finds the same.
//
// There is room for `capacity` items, at least one per request. The splits of a request take no more of it than leaves one
// for each of the requests behind it, or else the request is a single item, however long. That happens where requests
// share so many blocks that together they are longer than the pool (`CudaOperations`), and never writes past the end.
struct SplitScheduler {
    const Layer& layer;
    const Step& step;
    const i64 capacity;
    int before = 0, wanted_before = 0;  // items of the requests before `first_request`; had all that they wanted
    int first_request = 0;              // of the 32 that are looked at together
    int request = 0, split = 0, num_splits = 0;  // `num_splits` of the request

    ANTKV_DEVICE SplitScheduler(const Layer& layer, const Step& step, i64 capacity)
        : layer(layer), step(step), capacity(capacity) {}

    // Find item number `item`, which must not be before the last one found. False when there are fewer.
    ANTKV_DEVICE bool find(int item, int lane) {
        for (; first_request < step.num_reqs; first_request += kWarp) {
            const int candidate = first_request + lane;
            const int wanted = candidate < step.num_reqs ? num_splits_of(layer, step, candidate) : 0;
            const int wanted_upto = wanted_before + sum_upto(wanted, lane);
            const bool fits = wanted_upto + (step.num_reqs - 1 - candidate) <= capacity;
            const int own = fits ? wanted : smaller(wanted, 1);
            const int upto = before + sum_upto(own, lane);
            if (const u32 hits = ballot_warp(item < upto)) {
                const int hit = first_bit(hits);
                request = first_request + hit;
                num_splits = from_lane(own, hit);
                split = item - from_lane(upto, hit) + num_splits;
                return true;
            }
            before = from_lane(upto, kWarp - 1);
            wanted_before = from_lane(wanted_upto, kWarp - 1);
        }
        return false;
    }
};
