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
    coded_logits(split, rotation, buffer);
    const KeptRows own = kept_rows(split, ahead, token);
    const u32 keys = ballot_warp(own.key), corrected_keys = ballot_warp(own.corrects_key);
    const u32 values = ballot_warp(own.value), corrected_values = ballot_warp(own.corrects_value);
    sync_warp();
    for (int tile = 0; tile < kTiles; ++tile)
        if (keys >> tile * 16 & 0xffff) kept_logits(split, own.key, corrected_keys, tile);
    sync_warp();
    const bool visible = token + split.lane.index < split.end, exact = own.value && !own.corrects_value;
    write_weights(split, visible, exact, own.value, values, sums);
    sync_warp();
    for (int tile = 0; tile < kTiles; ++tile) {
        coded_values(split, buffer, tile, sums);
        if (values >> tile * 16 & 0xffff) kept_values(split, own.value, corrected_values, tile, sums);
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
    turn_back(split, split.begin, split.shared.query[0]);
    sync_block();
    int buffer = 0;
    for (int base = split.begin; base < split.end; base += kSpan, token += kSpan, buffer ^= 1) {
        const Ahead next = look_ahead(split, next_page, token + kSpan);
        copy_codes(split, next_page, token + kSpan, buffer ^ 1);
        next_page = page_at(split, token + 2 * kSpan);
        if (base + kSpan < split.end) turn_back(split, base + kSpan, split.shared.query[buffer ^ 1]);
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

// Join the warps, a few queries at a time: that is what shared memory has room for.
ANTKV_DEVICE void write_partial(const Split& split, const Sums& sums, float* partial) {
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
            const int column = item / kHeadSize, q = group * kValueColumns + column;
            if (q >= kGroup) continue;
            float maximum = -ANTKV_INFINITY, total = 0, result = 0;
            for (int w = 0; w < kWarps; ++w) maximum = fmaxf(maximum, shared.statistics[w][q][0]);
            for (int w = 0; w < kWarps; ++w) {
                const float weight = exp2_fast(shared.statistics[w][q][0] - maximum);
                total += weight * shared.statistics[w][q][1];
                result += weight * output[w][column][item % kHeadSize];
            }
            partial[q * kHeadSize + item % kHeadSize] = result;
            if (item % kHeadSize) continue;
            partial[kGroup * kHeadSize + q] = maximum;
            partial[kGroup * (kHeadSize + 1) + q] = total;
        }
    }
    sync_block();
}

ANTKV_DEVICE i64 partial_at(const Layer& layer, i64 max_splits, int request, int split, int head) {
    return ((request * max_splits + split) * layer.num_kv_heads + head) * kPartial;
}

}  // namespace

// Grid: (workers, num_kv_heads). Shared memory: the tables, then `Shared`.
// partials: (num_reqs, max_splits, num_kv_heads, kPartial).
ANTKV_KERNEL(kThreads)
antkv_decode(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows query, Rows key, Rows value, i64 max_splits,
             float* partials) {
    ANTKV_DYNAMIC_SHARED(memory);
    const Lane lane((int)threadIdx.x);
    const int head = (int)blockIdx.y, warp = (int)threadIdx.x / kWarp;
    Shared& shared = *(Shared*)(memory + Tables::kBytes);
    Items items;
    if (!items.find(layer, step, (int)blockIdx.x, lane.index)) return;
    const Tables tables(layer, head, lane, memory);
    const Rotation rotation = lane_rotation(layer, head, lane, warp);
    int item = (int)blockIdx.x;
    do {
        const int length = step.seq_lens[items.request], begin = items.split * layer.split;
        const int end = begin + layer.split < length ? begin + layer.split : length;
        const int hand = step.query_start_loc[items.request];
        const Split split = {layer, step, shared, tables, query, key, value, head, items.request,
                             begin, end, length - 1, hand, lane, warp};
        Sums sums;
        attend_split(split, rotation, sums);
        write_partial(split, sums, partials + partial_at(layer, max_splits, items.request, items.split, head));
        item += (int)gridDim.x;
    } while (items.find(layer, step, item, lane.index));
}

// Grid: (num_reqs, num_kv_heads), a thread per channel. lse: (num_tokens, num_heads), written, or null.
ANTKV_KERNEL(kHeadSize)
antkv_merge(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows output, float* lse, i64 max_splits,
            const float* partials) {
    const int request = (int)blockIdx.x, head = (int)blockIdx.y, channel = (int)threadIdx.x;
    const int count = num_splits(layer, step, request);
    if (count == 0) return;
    const int token = step.query_start_loc[request];
    const float* first = partials + partial_at(layer, max_splits, request, 0, head);
    const i64 stride = (i64)layer.num_kv_heads * kPartial;
    for (int q = 0; q < kGroup; ++q) {
        const float *maxima = first + kGroup * kHeadSize + q, *totals = maxima + kGroup;
        float maximum = -ANTKV_INFINITY, total = 0, result = 0;
        for (int i = 0; i < count; ++i) maximum = fmaxf(maximum, maxima[i * stride]);
        for (int i = 0; i < count; ++i) {
            const float weight = exp2_fast(maxima[i * stride] - maximum);
            total += weight * totals[i * stride];
            result += weight * first[i * stride + q * kHeadSize + channel];
        }
        output.at(token, head * kGroup + q)[channel] = (u16)pack(result / total, 0);
        if (lse && channel == 0)
            lse[(i64)token * layer.num_kv_heads * kGroup + head * kGroup + q] = maximum / kLog2E + logarithm(total);
    }
}
