// Attention of single tokens and drafts to the cache: one CTA per multiprocessor has the centroids of a KV head at hand and
// walks the splits of all queries. The last to write a split of a query joins them by their log-sum-exp.
//
// Angles are linear in the position, so the query is rotated back by the first position of a span of tokens, and decoded
// K rows are rotated by their offsets in it alone. A warp always has the same offsets: their cosines stay in registers.
#include "producer.cuh"
#include "logits.cuh"
#include "values.cuh"
#include "votes.cuh"

namespace {

// `anchors` are the first of them; few blocks have more.
ANTKV_DEVICE void correct_all_logits(const Tile& tile, Anchors anchors, u32 exact) {
    for (int first = 0;;) {
        if (anchors.hits & 0xff) correct_logits(tile, anchors, 0, first, exact);
        if (kStagesAnchors) return;
        if (anchors.hits & 0xff00) correct_logits(tile, anchors, 8, first + 8, exact);
        first += kAnchorsAtOnce;
        if (first >= visible_anchors(tile)) return;
        anchors = find_anchors(tile, first);
    }
}

ANTKV_DEVICE void correct_all_values(const Tile& tile, Anchors anchors, u32 exact, Sums& sums) {
    for (int first = 0;;) {
        const u8* rows = anchor_page(tile) + tile.in.layer.v_anchors + first * kHeadSize;
        for (u32 left = anchors.hits >> kAnchorsAtOnce; left; left &= left - 1) {
            const int row = first_bit(left), token = from_lane(anchors.at, kAnchorsAtOnce + row);
            // Exact tokens have no weight here. Without this test the compiler spills where tables are in L2.
            if (kCentroids == 256 || !(exact >> token & 1)) correct_values(tile, rows + row * kHeadSize, token, sums);
        }
        if (kStagesAnchors) return;
        first += kAnchorsAtOnce;
        if (first >= visible_anchors(tile)) return;
        anchors = find_anchors(tile, first);
    }
}

ANTKV_DEVICE void attend(const Tile& tile, u32 exact, const Rotation& rotation, Sums& sums) {
    static_assert(kTiles == 2, "the halves of a tile are named");
    // Tables in L2 are far: a half is fetched while the one before it is computed with.
    const Keys first_keys = fetch_keys(tile, 0);
    const Anchors anchors = find_anchors(tile, 0);
    const Keys second_keys = fetch_keys(tile, 1);
    Logits logits;
    coded_logits(tile, rotation, 0, first_keys, logits);
    const Values first_values = fetch_values(tile, 0);
    coded_logits(tile, rotation, 1, second_keys, logits);
    const Values second_values = fetch_values(tile, 1);
    ExactRow own = {};
    if (exact) own = find_row(tile, exact);
    u32 keys_kept = exact, values_kept = exact;
    if (anchors.exact || anchors.are_more) {
        find_exact_anchors(tile, anchors, own);
        keys_kept = ballot_warp(own.key), values_kept = ballot_warp(own.value);
    }
    if (anchors.of_keys() || keys_kept || tile.is_last) {
        put_logits(tile, logits);
        sync_warp();
        put_bias(tile, keys_kept);
        sync_warp();
        if (anchors.of_keys()) correct_all_logits(tile, anchors, exact);
        for (int half = 0; half < kTiles; ++half)
            if (keys_kept >> half * 16 & 0xffff) exact_logits(tile, own.key, half);
        sync_warp();
        take_logits(tile, logits);
    }
    write_weights(tile, values_kept, logits, sums);
    sync_warp();
    if (anchors.of_values()) correct_all_values(tile, anchors, exact, sums);
    coded_values(tile, 0, first_values, sums);
    coded_values(tile, 1, second_values, sums);
    if (values_kept) {
        for (int half = 0; half < kTiles; ++half)
            if (values_kept & value_tokens(half)) exact_values(tile, own.value, half, sums);
    }
}

ANTKV_DEVICE void clear(Sums& sums) {
    for (int i = 0; i < kOwnQueries; ++i) sums.maximum[i] = -ANTKV_INFINITY, sums.total[i] = 0;
    for (int set = 0; set < kOwnSets; ++set)
        for (int group = 0; group < kValueGroups; ++group)
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < 4; ++i) sums.output[set][group][half][i] = 0;
}

// --- Results.

// A split's: the output relative to `maximum` (group, head_size), maxima and sums (group).
constexpr int kPartial = kGroup * (kHeadSize + 2);

ANTKV_DEVICE float* partial_at(const Layer& layer, const Results& results, i64 item, int head) {
    ANTKV_EXPECT(item >= 0 && item < results.capacity);
    return results.partials + (item * layer.num_kv_heads + head) * kPartial;
}

ANTKV_DEVICE void write_output(const Results& results, int token, int head, int q, int channel, float result) {
    results.output.at(token, head * kGroup + q)[channel] = (u16)pack(result, 0);
}

// Leave the logits that votes are counted from in the split's last span, whose queries and codes nobody needs then.
ANTKV_DEVICE void leave_logits(const Tile& tile, Span& span) {
    const int first = tile.token - tile.position / kBlockSize * kBlockSize;
    const bool votes = is_voted_on(tile.in, tile.end, tile.position) && first >= 0 && tile.token < tile.end;
    Logits logits;
    if (votes) take_logits(tile, logits);
    // The warps' outputs will lie where logits are, too.
    sync_attending();
    if (!votes) return;
    for (int i = 0; i < kOwnQueries; ++i) {
        const int q = own_query(tile.lane, i);
        for (int k = 0; k < 4; ++k) {
            const int token = tile.lane.row + 8 * k;
            if (q < kGroup && tile.token + token < tile.end) span.voting[q][first + token] = logits.of[i][k];
        }
    }
}

// Join the splits of a query, in their order, where this one is the last to be written.
ANTKV_DEVICE void merge_splits(const Inputs& in, Shared& shared, const SplitDesc& desc) {
    const Layer& layer = in.layer;
    // Opaque: nothing that is computed from them ahead is worth a register of an attending warp.
    const int num_heads = opaque(layer.num_kv_heads), thread = opaque((int)threadIdx.x);
    const i64 item = desc.item - desc.token / layer.split, stride = (i64)num_heads * kPartial;
    // Nobody writes statistics before the attending warps have met again.
    u32& num_before = *(u32*)&shared.statistics[0][0];
    if (thread == 0) num_before = count_round(in.results.written + item * num_heads + in.head, desc.num_splits - 1);
    sync_attending();
    if (num_before + 1 < desc.num_splits) return;
    const float* first = partial_at(layer, in.results, item, in.head);
#pragma unroll 1
    for (int at = thread; at < kGroup * kHeadSize; at += kThreads) {
        const int q = at / kHeadSize;
        const float *maxima = first + kGroup * kHeadSize + q, *totals = maxima + kGroup;
        float maximum = -ANTKV_INFINITY, total = 0, result = 0;
        for (int i = 0; i < desc.num_splits; ++i) maximum = fmaxf(maximum, maxima[i * stride]);
        for (int i = 0; i < desc.num_splits; ++i) {
            const float weight = exp2_fast(maxima[i * stride] - maximum);
            total += weight * totals[i * stride];
            result += weight * first[i * stride + at];
        }
        write_output(in.results, desc.query_row, in.head, q, at % kHeadSize, result / total);
    }
}

// Join the warps, a few queries of the group at a time: that is what shared memory has room for. An only split is the
// output.
ANTKV_DEVICE void write_split(const Inputs& in, Shared& shared, const SplitDesc& desc, const Sums& sums,
                              Lane lane, int warp) {
    for (int i = 0; i < kOwnQueries; ++i) {
        float total = sums.total[i];
        for (int step = 0; step < 3; ++step) total += from_lane_xor(total, peer(step));
        const int q = own_query(lane, i);
        if (lane.row == 0 && q < kGroup) shared.statistics[warp][q] = {sums.maximum[i], total};
    }
    float* partial = desc.num_splits > 1 ? partial_at(in.layer, in.results, desc.item, in.head) : nullptr;
    float(*output)[kValueColumns][kHeadSize] = ((Merging*)shared.scratch)->output;
    for (int group = 0; group < kValueGroups; ++group) {
        for (int i = 0; i < 2; ++i) {
            const int column = lane.column * 2 + i;
            for (int own = 0; own < kOwnSets; ++own) {
                const int set = column % Tables::kSetColumns * kOwnSets + own;
                const int channel = Tables::value_quad(lane.row, set) * 4;
                const float(&sum)[2][4] = sums.output[own][group];
                float4* to = (float4*)&output[warp][column / Tables::kSetColumns][channel];
                *to = {sum[0][i], sum[0][2 + i], sum[1][i], sum[1][2 + i]};
            }
        }
        sync_attending();
        for (int at = (int)threadIdx.x; at < kValueColumns * kHeadSize; at += kThreads) {
            const int column = at / kHeadSize, q = group * kValueColumns + column, channel = at % kHeadSize;
            if (q >= kGroup) continue;
            float maximum = -ANTKV_INFINITY, total = 0, result = 0;
            for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.statistics[w][q].x);
            for (int w = 0; w < kWarps; ++w) {
                const float weight = exp2_fast(shared.statistics[w][q].x - maximum);
                total += weight * shared.statistics[w][q].y;
                result += weight * output[w][column][channel];
            }
            result *= Tables::value_scale(in.layer, in.head);
            if (!partial) {
                write_output(in.results, desc.query_row, in.head, q, channel, result / total);
                continue;
            }
            partial[q * kHeadSize + channel] = result;
            if (channel) continue;
            partial[kGroup * kHeadSize + q] = maximum;
            partial[kGroup * (kHeadSize + 1) + q] = total;
        }
        // The next queries, or the next tile, are written where these warps' outputs are.
        sync_attending();
    }
    if (partial) merge_splits(in, shared, desc);
}

ANTKV_DEVICE void release_slot(Shared& shared, int slot, Lane lane) {
    // Also, the next tile writes what this one has read.
    sync_warp();
    if (lane.index == 0) arrive(&shared.empty[slot]);
}

ANTKV_DEVICE void attend_all(const Inputs& in, Shared& shared, const Tables& tables, Lane lane, int warp) {
    const Rotation rotation = lane_rotation(in.layer, in.head, lane, warp);
    Sums sums;
    clear(sums);
    for (RingPosition at;; at.advance()) {
        wait(&shared.full[at.slot], at.parity);
        Span& span = shared.ring[at.slot];
        const uint4 first = *(const uint4*)&span.desc;
        const u32 exact = span.exact[warp];
        if ((int)first.x == kNoMore) return;
        const Tile tile = {in, shared, span, tables, lane, warp, (int)first.x + warp * kTokens, (int)first.y, (int)first.z,
                           (bool)first.w};
        if (tile.token < tile.end) attend(tile, exact, rotation, sums);
        if (!first.w) {
            release_slot(shared, at.slot, lane);
            continue;
        }
        const SplitDesc desc = span.desc;
        leave_logits(tile, span);
        release_slot(shared, at.slot, lane);
        write_split(in, shared, desc, sums, lane, warp);
        clear(sums);
    }
}

}  // namespace

// Grid: (workers, num_kv_heads). Shared memory: the tables, then `Shared`. A multiprocessor has one CTA, which the compiler
// is told lest it spill for a second.
ANTKV_KERNEL(kDecodeThreads, 1)
antkv_decode(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows query, Rows key, Rows value,
             ANTKV_ARGUMENT(Results) results) {
    ANTKV_DYNAMIC_SHARED(memory);
    const Lane lane(threadIdx.x);
    const int warp = (int)threadIdx.x / kWarp, item = (int)blockIdx.x;
    const Inputs in = {layer, step, query, key, value, results, (int)blockIdx.y};
    Shared& shared = *(Shared*)(memory + Tables::kBytes);
    SplitScheduler scheduler(layer, step, results.capacity);
    if (!scheduler.find(item, lane.index)) return;
    if (threadIdx.x == 0) {
        for (int slot = 0; slot < kRing; ++slot) {
            make_barrier(&shared.full[slot], kProducing + 1);
            make_barrier(&shared.empty[slot], kWarps);
        }
        publish_barriers();
    }
    sync_block();
    if (warp == kWarps) {
        produce_all(in, shared, scheduler, item, lane);
    } else {
        const Tables tables(layer, in.head, lane, memory);
        attend_all(in, shared, tables, lane, warp);
    }
}
