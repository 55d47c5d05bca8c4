// The work of a launch, found on the device: splits of the new tokens of requests that have no more than one and drafts.
#pragma once

#include "layer.cuh"

// One of a request's `score_slots` queries at most, whose splits are its own: it gets the bits that it gets without drafts.
struct Query {
    int request, row, length;  // row in the step's tensors; tokens that it sees, itself included

    // Number `index` of all requests. It sees nothing where there is none: in requests with fewer queries or with more, and in
    // the padding of a CUDA graph.
    ANTKV_DEVICE Query(const Layer& layer, const Step& step, int index)
        : request(index / layer.score_slots), row(step.query_start_loc[request] + index % layer.score_slots), length(0) {
        const int end = step.query_start_loc[request + 1], num_queries = end - step.query_start_loc[request];
        if (row < end && num_queries <= layer.score_slots) length = step.seq_lens[request] - (end - 1 - row);
    }
    ANTKV_DEVICE int num_splits(const Layer& layer) const { return (length + layer.split - 1) / layer.split; }
};

// The sum of `own` over this lane and those before it.
ANTKV_DEVICE int sum_upto(int own, int lane) {
    for (int distance = 1; distance < kWarp; distance *= 2) {
        const int other = from_lane(own, lane < distance ? lane : lane - distance);
        if (lane >= distance) own += other;
    }
    return own;
}

// Walks the splits of all queries in order; every warp walks alone and finds the same.
//
// There is room for `capacity` items, at least one per query. The splits of a query take no more of it than leaves one
// for each of the queries behind it, or else the query is a single item, however long. That happens where requests
// share so many blocks that together they are longer than the pool (`CudaOperations`), and never writes past the end.
struct SplitScheduler {
    const Layer& layer;
    const Step& step;
    const i64 capacity;
    const int num_queries;
    int before = 0, wanted_before = 0;  // items of the queries before `first_query`; had all that they wanted
    int first_query = 0;                // of the 32 that are looked at together
    int query = 0, split = 0, num_splits = 0;  // `num_splits` of the query

    ANTKV_DEVICE SplitScheduler(const Layer& layer, const Step& step, i64 capacity)
        : layer(layer), step(step), capacity(capacity), num_queries((int)step.num_reqs * layer.score_slots) {}

    // Find item number `item`, which must not be before the last one found. False when there are fewer.
    ANTKV_DEVICE bool find(int item, int lane) {
        for (; first_query < num_queries; first_query += kWarp) {
            const int candidate = first_query + lane;
            const int wanted = candidate < num_queries ? Query(layer, step, candidate).num_splits(layer) : 0;
            const int wanted_upto = wanted_before + sum_upto(wanted, lane);
            const bool fits = wanted_upto + (num_queries - 1 - candidate) <= capacity;
            const int own = fits ? wanted : smaller(wanted, 1);
            const int upto = before + sum_upto(own, lane);
            if (const u32 hits = ballot_warp(item < upto)) {
                const int hit = first_bit(hits);
                query = first_query + hit;
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
