// The producer warp fills the ring for the others: it finds splits, resolves their blocks, rotates the query, counts votes.
//
// It is ahead by the ring, across splits, so that nobody waits for the chain from a request to its blocks to their codes.
// The VQ page of a head is one run of bytes (codes, anchors, offsets of anchors), so one bulk copy brings it.
#pragma once

#include "split_scheduler.cuh"
#include "votes.cuh"

// The query rotated back by some position, of which a lane has neighbouring channels and their rotary partners.
constexpr int kLanePairs = kHeadSize / 2 / kWarp;
struct RotatedQuery {
    float first[kGroup][kLanePairs], second[kGroup][kLanePairs];
};

// Rotates it on by so many positions.
struct RotationBy {
    float cosine[kLanePairs], sine[kLanePairs];

    ANTKV_DEVICE RotationBy(const Layer& layer, int positions, Lane lane) {
        const i64 at = (i64)positions * (kHeadSize / 2) + lane.index * kLanePairs;
        const float unit = 1 / layer.rotary_magnitude;
        for (int i = 0; i < kLanePairs; ++i) {
            // Shorter tables do not reach so far.
            const bool known = layer.cos && positions < layer.rotary_rows;
            cosine[i] = known ? layer.cos[at + i] * unit : 1;
            sine[i] = known ? layer.sin[at + i] * unit : 0;
        }
    }

    ANTKV_DEVICE void apply(RotatedQuery& query) const {
#pragma unroll
        for (int i = 0; i < kLanePairs; ++i) {
#pragma unroll
            for (int q = 0; q < kGroup; ++q) {
                const float a = query.first[q][i], b = query.second[q][i];
                query.first[q][i] = a * cosine[i] + b * sine[i];
                query.second[q][i] = b * cosine[i] - a * sine[i];
            }
        }
    }
};

// Scaled for base-2 exponentials and for cosines and sines of any magnitude.
ANTKV_DEVICE RotatedQuery rotate_back(const Inputs& in, int position, int query_row, Lane lane) {
    const float scale = in.layer.scale * kLog2E;
    RotatedQuery query;
#pragma unroll
    for (int i = 0; i < kLanePairs; ++i) {
        const int channel = lane.index * kLanePairs + i;
        const int first = channel_at(in.layer, channel), second = channel_at(in.layer, channel + kHeadSize / 2);
#pragma unroll
        for (int q = 0; q < kGroup; ++q) {
            const u16* from = in.query.at(query_row, in.head * kGroup + q);
            query.first[q][i] = to_float(from[first]) * scale;
            query.second[q][i] = to_float(from[second]) * scale;
        }
    }
    RotationBy(in.layer, position, lane).apply(query);
    return query;
}

ANTKV_DEVICE void write_query(const RotatedQuery& query, uint2 (*to)[kQueryQuads], Lane lane) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
        u16* row = (u16*)to[q] + lane.index * kLanePairs;
        if constexpr (kLanePairs == 2) {
            *(u32*)row = pack_f16(query.first[q][0], query.first[q][1]);
            *(u32*)(row + kHeadSize / 2) = pack_f16(query.second[q][0], query.second[q][1]);
        } else {
            *row = (u16)pack_f16(query.first[q][0], 0);
            *(row + kHeadSize / 2) = (u16)pack_f16(query.second[q][0], 0);
        }
    }
}

// The query as it is, of which a lane has neighbouring channels.
//
// bias: what the logits of coded keys are short of, to base 2 (`jensen_bias` of vllm_antkv/ops/reference.py), of the query with
// the lane's number. There are far more coded keys than others, so the others' logits go down by it: a softmax is the same.
struct Plain {
    u32 words[kGroup][kLanePairs];
    float bias = 0;

    ANTKV_DEVICE Plain(const Inputs& in, int query_row, Lane lane) {
        const float scale = in.layer.scale * kLog2E;
        float sums[kGroup] = {};
#pragma unroll
        for (int q = 0; q < kGroup; ++q) {
            const int own = lane.index * kLanePairs * 2;
            const u16* from = in.query.at(query_row, in.head * kGroup + q) + own;
            const float* weights = in.layer.jensen_weights + (in.head * kGroup + q) * kHeadSize + own;
            for (int i = 0; i < kLanePairs; ++i) {
                const float first = to_float(from[2 * i]), second = to_float(from[2 * i + 1]);
                words[q][i] = pack_f16(first * scale, second * scale);
                sums[q] += (first * first * weights[2 * i] + second * second * weights[2 * i + 1]) * kLog2E;
            }
        }
        sums_of_warp(sums);
#pragma unroll
        for (int q = 0; q < kGroup; ++q)
            if (lane.index == q) bias = sums[q];
    }
    ANTKV_DEVICE void write(Span& span, Lane lane) const {
#pragma unroll
        for (int q = 0; q < kGroup; ++q)
            for (int i = 0; i < kLanePairs; ++i) ((u32*)span.plain[q])[lane.index * kLanePairs + i] = words[q][i];
        if (lane.index < kGroup) span.bias[lane.index] = bias;
    }
};

// The slot of the ring that comes next.
struct RingPosition {
    int slot = 0;
    u32 parity = 0;
    ANTKV_DEVICE void advance() {
        if (++slot == kRing) slot = 0, parity ^= 1;
    }
};

// Copies `bytes` from global memory; counts as an arrival at the barrier, of one thread or of the whole warp.
constexpr int kProducing = kBulk ? 1 : kWarp;
ANTKV_DEVICE void produce_pages(const Inputs& in, Span& span, const u8* page, int num_pages, int query_row,
                                Barrier* full, Lane lane) {
    const u8* raw = (const u8*)in.query.at(query_row, in.head * kGroup);
    const int bytes = in.layer.staged_bytes;
    if constexpr (kBulk) {
        // Copies may land before their bytes are expected: the count of bytes may be negative, and the phase waits for lane 0.
        if (lane.index == 0) arrive_expecting(full, num_pages * bytes + sizeof span.raw);
        if (lane.index < num_pages) copy_bulk(span.pages[lane.index], page, bytes, full);
        if (lane.index == kSpanPages) copy_bulk(span.raw, raw, sizeof span.raw, full);
    } else {
        for (int i = 0; i < num_pages; ++i) {
            const u8* from = (const u8*)from_lane((i64)page, i);
            for (int at = lane.index * 16; at < bytes; at += kWarp * 16) copy16_async(span.pages[i] + at, from + at);
        }
        for (int at = lane.index * 16; at < (int)sizeof span.raw; at += kWarp * 16)
            copy16_async((u8*)span.raw + at, raw + at);
        arrive_when_copied(full);
    }
}

// Which of a lane's neighbouring tokens the query sees in full precision: one bit each.
constexpr int kLooked = kSpan / kWarp;
static_assert(kLooked % 4 == 0, "the table of last queries is read 16 bytes at a time");
ANTKV_DEVICE u32 find_exact(const i32* last_query, int token, int end, int position, Lane lane) {
    const int first = token + lane.index * kLooked;
    u32 exact = 0;
#pragma unroll
    for (int i = 0; i < kLooked; i += 4) {
        int last[4] = {-1, -1, -1, -1};
        if (first + i + 4 <= end) {
            const uint4 words = *(const uint4*)(last_query + first + i);
            last[0] = words.x, last[1] = words.y, last[2] = words.z, last[3] = words.w;
        } else {
            for (int j = 0; j < 4; ++j)
                if (first + i + j < end) last[j] = last_query[first + i + j];
        }
        for (int j = 0; j < 4; ++j) exact |= (u32)(last[j] >= position) << (i + j);
    }
    return exact;
}

// A word for each of the warps that attend.
ANTKV_DEVICE void write_exact(u32 exact, u32 (&to)[kWarps], Lane lane) {
    constexpr int kLanes = kWarp / kLooked;
    u32 word = exact << lane.index % kLanes * kLooked;
    for (int mask = 1; mask < kLanes; mask *= 2) word |= from_lane_xor(word, mask);
    if (lane.index % kLanes == 0) to[lane.index / kLanes] = word;
}

// The ring as the producer warp sees it.
struct Ring {
    const Inputs& in;
    Shared& shared;
    const Lane lane;
    RingPosition at;
    u32 due = 0;  // slots with spans that votes are to be counted of: a bit each

    // The slot that comes next, when all that attend are done with it.
    ANTKV_DEVICE Span& acquire_slot() {
        Span& span = shared.ring[at.slot];
        wait(&shared.empty[at.slot], at.parity ^ 1);
        if (due >> at.slot & 1) {
            count_votes(in, span, lane);
            due ^= 1u << at.slot;
            // The next span is written where other lanes have read.
            sync_warp();
        }
        return span;
    }
    ANTKV_DEVICE Barrier* full() const { return &shared.full[at.slot]; }
};

ANTKV_DEVICE void produce_split(Ring& ring, const SplitScheduler& scheduler, int item) {
    const Inputs& in = ring.in;
    const Lane lane = ring.lane;
    const Query own(in.layer, in.step, scheduler.query);
    const int position = own.length - 1;
    const int begin = scheduler.split * in.layer.split;
    const int end = scheduler.split + 1 == scheduler.num_splits ? own.length : begin + in.layer.split;
    const Plain plain(in, own.row, lane);
    RotatedQuery query = rotate_back(in, begin, own.row, lane);
    const RotationBy by_half(in.layer, 16, lane), by_rest(in.layer, kSpan - 16, lane);
    for (int token = begin; token < end; token += kSpan, ring.at.advance()) {
        const bool is_last = token + kSpan >= end;
        const int num_pages = smaller((end - token + kBlockSize - 1) / kBlockSize, kSpanPages);
        const u8* page = nullptr;
        if (lane.index < num_pages)
            page = vq_page(in.layer, in.step, own.request, in.head, token / kBlockSize + lane.index);
        const u32 exact = find_exact(in.layer.last_query, token, end, position, lane);
        Span& span = ring.acquire_slot();
        produce_pages(in, span, page, num_pages, own.row, ring.full(), lane);
        plain.write(span, lane);
        write_query(query, span.query[0], lane);
        by_half.apply(query);
        write_query(query, span.query[1], lane);
        by_rest.apply(query);
        write_exact(exact, span.exact, lane);
        if (is_last && is_voted_on(in, end, position)) ring.due |= 1u << ring.at.slot;
        if (lane.index < kSpanPages) span.pages_at[lane.index] = page;
        if (lane.index == 0)
            span.desc = {token, end, position, is_last, own.row, own.request, item, scheduler.num_splits};
        sync_warp();
        if (lane.index == 0) arrive(ring.full());
    }
}

// Produces a split of each round of as many as there are workers; `scheduler` stands at the first, `item`. From round to round
// workers take turns by 0, 1, 3, 6, ... places: where requests are equally long, none has the last splits of all of them,
// which take longer.
ANTKV_DEVICE void produce_all(const Inputs& in, Shared& shared, SplitScheduler& scheduler, int item, Lane lane) {
    Ring ring = {in, shared, lane};
    const int workers = (int)gridDim.x;
    int place = item;
    for (int round = 1;; ++round) {
        produce_split(ring, scheduler, item);
        place = (place + round) % workers;
        item = round * workers + place;
        if (!scheduler.find(item, lane.index)) break;
    }
    Span& span = ring.acquire_slot();
    if (lane.index == 0) span.desc.token = kNoMore;
    // Nothing is copied; the phase waits for lane 0, which has written.
    if (lane.index < kProducing) arrive(ring.full());
    if (lane.index == 0) arrive(ring.full());
    while (ring.due) {
        ring.at.advance();
        ring.acquire_slot();
    }
}
