// The warp that brings spans to the others: it finds the splits, resolves their blocks, turns the query, and counts votes.
//
// It is ahead by the ring, across splits, so that nobody waits for the chain from a request to its blocks to their codes.
// The VQ page of a head is one run of bytes (codes, anchors, offsets of anchors), so one bulk copy brings it.
#pragma once

#include "items.cuh"
#include "votes.cuh"

// The query turned back by some position, of which a lane has neighbouring channels and their rotary partners.
constexpr int kTurned = kHeadSize / 2 / kWarp;
struct Turned {
    float first[kGroup][kTurned], second[kGroup][kTurned];
};

// What turns it on by so many positions.
struct Turning {
    float cosine[kTurned], sine[kTurned];

    ANTKV_DEVICE Turning(const Layer& layer, int positions, Lane lane) {
        const i64 at = (i64)positions * (kHeadSize / 2) + lane.index * kTurned;
        const float unit = 1 / layer.rotary_magnitude;
        for (int i = 0; i < kTurned; ++i) {
            // Shorter tables are not turned on so far.
            const bool known = layer.cos && positions < layer.rotary_rows;
            cosine[i] = known ? layer.cos[at + i] * unit : 1;
            sine[i] = known ? layer.sin[at + i] * unit : 0;
        }
    }

    ANTKV_DEVICE void apply(Turned& query) const {
#pragma unroll
        for (int i = 0; i < kTurned; ++i) {
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
ANTKV_DEVICE Turned turn_back(const Inputs& in, int position, int hand, Lane lane) {
    const float scale = in.layer.scale * kLog2E;
    Turned query;
#pragma unroll
    for (int i = 0; i < kTurned; ++i) {
        const int channel = lane.index * kTurned + i;
        const int first = channel_at(in.layer, channel), second = channel_at(in.layer, channel + kHeadSize / 2);
#pragma unroll
        for (int q = 0; q < kGroup; ++q) {
            const u16* from = in.query.at(hand, in.head * kGroup + q);
            query.first[q][i] = to_float(from[first]) * scale;
            query.second[q][i] = to_float(from[second]) * scale;
        }
    }
    Turning(in.layer, position, lane).apply(query);
    return query;
}

ANTKV_DEVICE void write_query(const Turned& query, uint2 (*to)[kQueryQuads], Lane lane) {
#pragma unroll
    for (int q = 0; q < kGroup; ++q) {
        u16* row = (u16*)to[q] + lane.index * kTurned;
        if constexpr (kTurned == 2) {
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
    u32 words[kGroup][kTurned];
    float bias = 0;

    ANTKV_DEVICE Plain(const Inputs& in, int hand, Lane lane) {
        const float scale = in.layer.scale * kLog2E;
        float sums[kGroup] = {};
#pragma unroll
        for (int q = 0; q < kGroup; ++q) {
            const int own = lane.index * kTurned * 2;
            const u16* from = in.query.at(hand, in.head * kGroup + q) + own;
            const float* weights = in.layer.jensen_weights + (in.head * kGroup + q) * kHeadSize + own;
            for (int i = 0; i < kTurned; ++i) {
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
            for (int i = 0; i < kTurned; ++i) ((u32*)span.plain[q])[lane.index * kTurned + i] = words[q][i];
        if (lane.index < kGroup) span.bias[lane.index] = bias;
    }
};

// Whose turn in the ring it is.
struct Turn {
    int slot = 0;
    u32 parity = 0;
    ANTKV_DEVICE void advance() {
        if (++slot == kRing) slot = 0, parity ^= 1;
    }
};

// Brings `bytes` from global memory and counts as an arrival at the barrier, of one thread or of the whole warp.
constexpr int kBringing = kBulk ? 1 : kWarp;
ANTKV_DEVICE void bring_pages(const Inputs& in, Span& span, const u8* page, int num_pages, int hand, Barrier* full,
                              Lane lane) {
    const u8* raw = (const u8*)in.query.at(hand, in.head * kGroup);
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

// The ring as the bringing warp sees it.
struct Ring {
    const Inputs& in;
    Shared& shared;
    const Lane lane;
    Turn turn;
    u32 due = 0;  // slots with spans that votes are to be counted of: a bit each

    // The slot whose turn it is, when all that attend are done with it.
    ANTKV_DEVICE Span& take() {
        Span& span = shared.ring[turn.slot];
        wait(&shared.empty[turn.slot], turn.parity ^ 1);
        if (due >> turn.slot & 1) {
            count_votes(in, span, lane);
            due ^= 1u << turn.slot;
            // The next span is written where other lanes have read.
            sync_warp();
        }
        return span;
    }
    ANTKV_DEVICE Barrier* full() const { return &shared.full[turn.slot]; }
};

ANTKV_DEVICE void bring_split(Ring& ring, const Items& items, int item) {
    const Inputs& in = ring.in;
    const Lane lane = ring.lane;
    const int length = in.step.seq_lens[items.request], hand = in.step.query_start_loc[items.request];
    const int begin = items.split * in.layer.split;
    const int end = items.split + 1 == items.num_splits ? length : begin + in.layer.split;
    if (in.head == 0 && items.split == 0 && lane.index == 0)
        in.results.places[items.request] = {item, items.num_splits};
    const Plain plain(in, hand, lane);
    Turned query = turn_back(in, begin, hand, lane);
    const Turning by_half(in.layer, 16, lane), by_rest(in.layer, kSpan - 16, lane);
    for (int token = begin; token < end; token += kSpan, ring.turn.advance()) {
        const bool is_last = token + kSpan >= end;
        const int num_pages = smaller((end - token + kBlockSize - 1) / kBlockSize, kSpanPages);
        const u8* page = nullptr;
        if (lane.index < num_pages)
            page = vq_page(in.layer, in.step, items.request, in.head, token / kBlockSize + lane.index);
        const u32 exact = find_exact(in.layer.last_query, token, end, length - 1, lane);
        Span& span = ring.take();
        bring_pages(in, span, page, num_pages, hand, ring.full(), lane);
        plain.write(span, lane);
        write_query(query, span.query[0], lane);
        by_half.apply(query);
        write_query(query, span.query[1], lane);
        by_rest.apply(query);
        write_exact(exact, span.exact, lane);
        if (is_last && is_voted_on(in, end, length - 1)) ring.due |= 1u << ring.turn.slot;
        if (lane.index < kSpanPages) span.pages_at[lane.index] = page;
        if (lane.index == 0)
            span.work = {token, end, length - 1, is_last, hand, items.request, item, items.num_splits};
        sync_warp();
        if (lane.index == 0) arrive(ring.full());
    }
}

// Brings the splits `item`, of which `items` stands at the first, `item` + the workers, ...
ANTKV_DEVICE void bring_all(const Inputs& in, Shared& shared, Items& items, int item, Lane lane) {
    Ring ring = {in, shared, lane};
    do {
        bring_split(ring, items, item);
        item += (int)gridDim.x;
    } while (items.find(item, lane.index));
    Span& span = ring.take();
    if (lane.index == 0) span.work.token = kNoMore;
    // Nothing is copied; the phase waits for lane 0, which has written.
    if (lane.index < kBringing) arrive(ring.full());
    if (lane.index == 0) arrive(ring.full());
    while (ring.due) {
        ring.turn.advance();
        ring.take();
    }
}
