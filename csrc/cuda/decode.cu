// Attention of single queries to the cache: one CTA per multiprocessor has the centroids of a KV head at hand and walks
// the splits of all requests; `antkv_merge` joins the splits of a request by their log-sum-exp.
//
// Angles are linear in the position, so the query is turned back by the first position of a span of tokens, and decoded
// K rows are turned by their offsets in it alone. A warp always has the same offsets: their cosines stay in registers.
#include "items.cuh"
#include "logits.cuh"
#include "values.cuh"

namespace {

// The 32 tokens of a warp in a span.
ANTKV_DEVICE void attend(const Split& split, const Rotation& rotation, const Ahead& ahead, int token, int buffer,
                         Sums& sums) {
    const u8 *k_rows = ahead.page + split.layer.k_anchors, *v_rows = ahead.page + split.layer.v_anchors;
    // A query sees the anchors of the blocks before its own; few of them have more than 32.
    const int more_rows = token / kBlockSize < split.position / kBlockSize ? split.layer.anchor_rows : 0;
    // The loads of their rows are under way while logits are computed.
    const auto k_anchors = find_anchors<KeyPart>(split, token, ahead.k_anchor, k_rows);
    const auto v_anchors = find_anchors<ValuePart>(split, token, ahead.v_anchor, v_rows);
    coded_logits(split, rotation, buffer);
    u32 exact;
    const KeptRows own = kept_rows(split, ahead, token, exact);
    sync_warp();
    correct_logits(split, k_anchors, exact);
    for (int first = kWarp; first < more_rows; first += kWarp) {
        const int offset = anchor_offset(split, ahead, first, 0);
        correct_logits(split, find_anchors<KeyPart>(split, token, offset, k_rows + first * kHeadSize), exact);
    }
    for (int tile = 0; tile < kTiles; ++tile)
        if (exact >> tile * 16 & 0xffff) kept_logits(split, own.key, tile);
    sync_warp();
    write_weights(split, token + split.lane.index < split.end, own.key, exact, sums);
    sync_warp();
    correct_values(split, v_anchors, exact, sums);
    for (int first = kWarp; first < more_rows; first += kWarp) {
        const int offset = anchor_offset(split, ahead, first, 1);
        correct_values(split, find_anchors<ValuePart>(split, token, offset, v_rows + first * kHeadSize), exact, sums);
    }
    for (int tile = 0; tile < kTiles; ++tile) {
        coded_values(split, buffer, tile, sums);
        if (exact >> tile * 16 & 0xffff) kept_values(split, own.value, tile, sums);
    }
    // The next tile writes what this one has read.
    sync_warp();
}

ANTKV_DEVICE void attend_split(const Split& split, const Rotation& rotation, Sums& sums) {
    for (int q = 0; q < kGroup; ++q) sums.maximum[q] = -ANTKV_INFINITY, sums.total[q] = 0;
    for (int set = 0; set < kOwnSets; ++set)
        for (int group = 0; group < kValueGroups; ++group)
            for (int half = 0; half < 2; ++half)
                for (int i = 0; i < 4; ++i) sums.output[set][group][half][i] = 0;

    int token = split.begin + split.warp * kTokens;
    Ahead ahead = look_ahead(split, page_at(split, token), token);
    const u8* next_page = page_at(split, token + kSpan);
    copy_codes(split, ahead.page, token, 0);
    Turning turning = start_turning(split);
    write_query(turning, split.shared.query[0]);
    write_raw_query(split);
    sync_block();
    int buffer = 0;
    for (int base = split.begin; base < split.end; base += kSpan, token += kSpan, buffer ^= 1) {
        const Ahead next = look_ahead(split, next_page, token + kSpan);
        copy_codes(split, next_page, token + kSpan, buffer ^ 1);
        next_page = page_at(split, token + 2 * kSpan);
        if (base + kSpan < split.end) {
            turn_on(turning);
            write_query(turning, split.shared.query[buffer ^ 1]);
        }
        wait_for_copies<1>();
        sync_warp();
        if (ahead.page) attend(split, rotation, ahead, token, buffer, sums);
        ahead = next;
        sync_block();
    }
    // Nothing is under way; still, the staging buffers are about to be used otherwise.
    wait_for_copies<0>();
}

// --- Results.

// A split's: the output relative to `maximum` (group, head_size), maxima and sums (group).
constexpr int kPartial = kGroup * (kHeadSize + 2);

ANTKV_DEVICE float* partial_at(const Layer& layer, const Results& results, i64 item, int head) {
    return results.partials + (item * layer.num_kv_heads + head) * kPartial;
}

// A channel of the output of query `q` of the group, and with the first of them the log-sum-exp.
ANTKV_DEVICE void write_output(const Layer& layer, const Results& results, int token, int head, int q, int channel,
                               float result, float maximum, float total) {
    results.output.at(token, head * kGroup + q)[channel] = (u16)pack(result / total, 0);
    if (results.lse && channel == 0)
        results.lse[(i64)token * layer.num_kv_heads * kGroup + head * kGroup + q] = maximum / kLog2E + logarithm(total);
}

// Join the warps, a few queries at a time: that is what shared memory has room for. partial: null where the split is all
// there is of its request.
ANTKV_DEVICE void write_split(const Split& split, const Sums& sums, const Results& results, float* partial) {
    Shared& shared = split.shared;
    const Lane lane = split.lane;
    for (int q = 0; q < kGroup; ++q) {
        const float total = sum_of_warp(sums.total[q]);
        if (lane.index) continue;
        shared.statistics[split.warp][q][0] = sums.maximum[q];
        shared.statistics[split.warp][q][1] = total;
    }
    float(*output)[kValueColumns][kHeadSize] = ((Merging*)shared.staging)->output;
    for (int group = 0; group < kValueGroups; ++group) {
        sync_block();
        for (int i = 0; i < 2; ++i) {
            const int column = lane.column * 2 + i;
            for (int own = 0; own < kOwnSets; ++own) {
                const int set = kOwnSets == 1 ? column % kSets : own, channel = Tables::value_quad(lane.row, set) * 4;
                const float(&sum)[2][4] = sums.output[own][group];
                float4* to = (float4*)&output[split.warp][column / Tables::kSetColumns][channel];
                *to = {sum[0][i], sum[0][2 + i], sum[1][i], sum[1][2 + i]};
            }
        }
        sync_block();
        for (int item = (int)threadIdx.x; item < kValueColumns * kHeadSize; item += kThreads) {
            const int column = item / kHeadSize, q = group * kValueColumns + column, channel = item % kHeadSize;
            if (q >= kGroup) continue;
            float maximum = -ANTKV_INFINITY, total = 0, result = 0;
            for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.statistics[w][q][0]);
            for (int w = 0; w < kWarps; ++w) {
                const float weight = exp2_fast(shared.statistics[w][q][0] - maximum);
                total += weight * shared.statistics[w][q][1];
                result += weight * output[w][column][channel];
            }
            if (!partial) {
                write_output(split.layer, results, split.hand, split.head, q, channel, result, maximum, total);
                continue;
            }
            partial[q * kHeadSize + channel] = result;
            if (channel) continue;
            partial[kGroup * kHeadSize + q] = maximum;
            partial[kGroup * (kHeadSize + 1) + q] = total;
        }
    }
    sync_block();
}

}  // namespace

// Grid: (workers, num_kv_heads). Shared memory: the tables, then `Shared`.
ANTKV_KERNEL(kThreads)
antkv_decode(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows query, Rows key, Rows value,
             ANTKV_ARGUMENT(Results) results) {
    ANTKV_DYNAMIC_SHARED(memory);
    const Lane lane((int)threadIdx.x);
    const int head = (int)blockIdx.y, warp = (int)threadIdx.x / kWarp;
    Shared& shared = *(Shared*)(memory + Tables::kBytes);
    Items items(layer, step, results.capacity);
    int item = (int)blockIdx.x;
    if (!items.find(item, lane.index)) return;
    const Tables tables(layer, head, lane, memory);
    const Rotation rotation = lane_rotation(layer, head, lane, warp);
    do {
        const int length = step.seq_lens[items.request], begin = items.split * layer.split;
        const int end = items.split + 1 == items.num_splits ? length : begin + layer.split;
        const int hand = step.query_start_loc[items.request];
        const Split split = {layer, step, shared, tables, query, key, value, head, items.request,
                             begin, end, length - 1, hand, lane, warp};
        if (head == 0 && items.split == 0 && threadIdx.x == 0) results.places[items.request] = {item, items.num_splits};
        Sums sums;
        attend_split(split, rotation, sums);
        write_split(split, sums, results, items.num_splits > 1 ? partial_at(layer, results, item, head) : nullptr);
        item += (int)gridDim.x;
    } while (items.find(item, lane.index));
}

// Grid: (num_reqs, num_kv_heads); a thread per query of the group and channel, or as many as a CTA can have.
constexpr int kMergeThreads = smaller(kGroup * kHeadSize, 1024);
ANTKV_KERNEL(kMergeThreads)
antkv_merge(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, ANTKV_ARGUMENT(Results) results) {
    const int request = (int)blockIdx.x, head = (int)blockIdx.y;
    // Whether there is anything in `places`.
    if (wanted_splits(layer, step, request) == 0) return;
    const Place place = results.places[request];
    if (place.num_splits == 1) return;
    const float* first = partial_at(layer, results, place.item, head);
    const i64 stride = (i64)layer.num_kv_heads * kPartial;
    for (int at = (int)threadIdx.x; at < kGroup * kHeadSize; at += kMergeThreads) {
        const int q = at / kHeadSize;
        const float *maxima = first + kGroup * kHeadSize + q, *totals = maxima + kGroup;
        float maximum = -ANTKV_INFINITY, total = 0, result = 0;
        for (int i = 0; i < place.num_splits; ++i) maximum = fmaxf(maximum, maxima[i * stride]);
        for (int i = 0; i < place.num_splits; ++i) {
            const float weight = exp2_fast(maxima[i * stride] - maximum);
            total += weight * totals[i * stride];
            result += weight * first[i * stride + at];
        }
        write_output(layer, results, step.query_start_loc[request], head, q, at % kHeadSize, result, maximum, total);
    }
}
