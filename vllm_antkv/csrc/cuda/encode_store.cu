// Codes of the step's tokens into VQ pages, their full-precision rows into recency pages.
#include "nearest.cuh"

namespace {

constexpr int kRun = kMaxTiles * 16;  // tokens of a CTA at most
// Parts of the centroids of a sub-vector, so that every warp has something to search.
constexpr int kParts = larger(kWarps / kSubVectors, 1);

struct Shared {
    float rows[kRun][kHeadSize];
    float scores[kRun][kParts][kSubVectors];
    int request[kRun], position[kRun];
    u16 codes[kRun][kParts][kSubVectors];
};

static_assert(sizeof(Shared) == ANTKV_ENCODE_SHARED, "vllm_antkv/ops/cuda_build.py counts otherwise");

// One of K and V of a run of tokens, for one KV head.
struct Run {
    const Layer& layer;
    const Step& step;
    Shared& shared;
    const Rows in_hand;
    const int head, first, count;
    const bool of_values;
};

// The request and position of a row of the step's tensors.
ANTKV_DEVICE void find_token(const Step& step, int token, int& request, int& position) {
    int low = 0, high = (int)step.num_reqs;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (step.query_start_loc[middle] <= token) low = middle;
        else high = middle;
    }
    ANTKV_EXPECT(step.query_start_loc[low] <= token && token < step.query_start_loc[low + 1]);
    request = low;
    position = step.seq_lens[low] - (step.query_start_loc[low + 1] - token);
    ANTKV_EXPECT(position >= 0);
}

ANTKV_DEVICE u8* page_of(const Run& run, int t) {
    const int block = run.shared.position[t] / kBlockSize;
    return vq_page(run.layer, run.step, run.shared.request[t], run.head, block);
}

ANTKV_DEVICE void reset_anchors(const Run& run) {
    for (int t = (int)threadIdx.x / kWarp; t < run.count; t += kWarps) {
        if (run.shared.position[t] % kBlockSize) continue;
        // Blocks fill from their first token, so whoever had the block before left its anchors until here.
        i16* offsets = (i16*)(page_of(run, t) + run.layer.anchor_offsets);
        for (int row = (int)threadIdx.x % kWarp; row < 2 * run.layer.anchor_rows; row += kWarp) offsets[row] = -1;
    }
}

ANTKV_DEVICE void copy_rows(const Run& run) {
    constexpr int kChunks = kRowBytes / 16;
    for (int item = (int)threadIdx.x; item < run.count * kChunks; item += kThreads) {
        const int t = item / kChunks, chunk = item % kChunks;
        u8* row = recency_row(run.layer, run.step, run.shared.request[t], run.head, run.shared.position[t]);
        if (!row) continue;
        const uint4* from = (const uint4*)run.in_hand.at(run.first + t, run.head);
        ANTKV_EXPECT((u64)from % sizeof(uint4) == 0);
        ((uint4*)(row + (run.of_values ? run.layer.recency_v : 0)))[chunk] = from[chunk];
    }
}

ANTKV_DEVICE void load_rows(const Run& run) {
    for (int item = (int)threadIdx.x; item < run.count * kHeadSize; item += kThreads) {
        const int t = item / kHeadSize, place = item % kHeadSize;
        const int channel = run.of_values ? place : channel_at(run.layer, place);
        run.shared.rows[t][place] = to_float(run.in_hand.at(run.first + t, run.head)[channel]);
    }
}

// K as it was before RoPE.
ANTKV_DEVICE void unrotate(const Run& run) {
    const Layer& layer = run.layer;
    const int half = layer.rotary_dim / 2;
    for (int item = (int)threadIdx.x; item < run.count * half; item += kThreads) {
        const int t = item / half, c = item % half;
        ANTKV_EXPECT(run.shared.position[t] < layer.rotary_rows);
        const i64 at = (i64)run.shared.position[t] * half + c;
        const float cos = layer.cos[at], sin = layer.sin[at], norm = cos * cos + sin * sin;
        float& first = run.shared.rows[t][layer.is_neox_style ? c : 2 * c];
        float& second = run.shared.rows[t][layer.is_neox_style ? c + half : 2 * c + 1];
        const float a = first, b = second;
        first = (a * cos + b * sin) / norm;
        second = (b * cos - a * sin) / norm;
    }
}

// Nearest centroids of a sub-vector of every row, among a part of the centroids.
ANTKV_DEVICE void search(const Run& run, int s, int part) {
    const Layer& layer = run.layer;
    const Lane lane((int)threadIdx.x);
    const i64 table = ((i64)run.head * kSubVectors + s) * kCentroids;
    const u16* centroids = (run.of_values ? layer.v_centroids : layer.k_centroids) + table * kSubVector;
    const float* half_norms = (run.of_values ? layer.v_half_norms : layer.k_half_norms) + table;
    const int num_tiles = (run.count + 15) / 16, begin = part * (kCentroids / kParts);
    const Nearest nearest = find_nearest(run.shared.rows[0] + s * kSubVector, kHeadSize, num_tiles, centroids,
                                         half_norms, begin, begin + kCentroids / kParts, lane);
#pragma unroll
    for (int i = 0; i < 2 * kMaxTiles; ++i) {
        const int t = i * 8 + lane.row;
        if (lane.column || t >= run.count) continue;
        run.shared.scores[t][part][s] = nearest.score[i / 2][i % 2];
        run.shared.codes[t][part][s] = (u16)nearest.code[i / 2][i % 2];
    }
}

// The nearest centroid of all parts. Lower parts have lower codes.
ANTKV_DEVICE int code_of(const Run& run, int t, int s) {
    int best = 0;
    for (int part = 1; part < kParts; ++part)
        if (run.shared.scores[t][part][s] < run.shared.scores[t][best][s]) best = part;
    ANTKV_EXPECT(run.shared.codes[t][best][s] < kCentroids);
    return run.shared.codes[t][best][s];
}

// Byte `at` of a packed row; 12-bit codes lie two in three bytes.
ANTKV_DEVICE u8 packed_byte(const Run& run, int t, int at) {
    if constexpr (kCentroids == 256) return (u8)code_of(run, t, at);
    const int first = at / 3 * 2;
    if (at % 3 == 0) return (u8)code_of(run, t, first);
    if (at % 3 == 2) return (u8)(code_of(run, t, first + 1) >> 4);
    return (u8)(code_of(run, t, first) >> 8 | code_of(run, t, first + 1) << 4);
}

ANTKV_DEVICE void store_codes(const Run& run) {
    for (int item = (int)threadIdx.x; item < run.count * kCodeBytes; item += kThreads) {
        const int t = item / kCodeBytes, at = item % kCodeBytes;
        u8* codes = page_of(run, t) + (run.of_values ? run.layer.v_codes : 0);
        codes[(run.shared.position[t] % kBlockSize) * kCodeBytes + at] = packed_byte(run, t, at);
    }
}

}  // namespace

// Grid: (runs, num_kv_heads, K and V). All runs are as many tiles of 16 tokens long: the fewer of them, the longer.
ANTKV_KERNEL(kThreads)
antkv_encode_store(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows key, Rows value) {
    ANTKV_DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int num_tokens = step.query_start_loc[step.num_reqs], num_runs = (int)gridDim.x;
    const int length = ((num_tokens + 15) / 16 + num_runs - 1) / num_runs * 16, first = (int)blockIdx.x * length;
    if (first >= num_tokens) return;
    const bool of_values = blockIdx.z == 1;
    const int count = smaller(length, num_tokens - first);
    const Run run = {layer, step, shared, of_values ? value : key, (int)blockIdx.y, first, count, of_values};
    if ((int)threadIdx.x < run.count)
        find_token(step, first + (int)threadIdx.x, shared.request[threadIdx.x], shared.position[threadIdx.x]);
    load_rows(run);
    sync_block();
    if (!of_values) {
        reset_anchors(run);
        if (layer.cos) unrotate(run);
    }
    copy_rows(run);
    sync_block();
    for (int item = (int)threadIdx.x / kWarp; item < kSubVectors * kParts; item += kWarps)
        search(run, item % kSubVectors, item / kSubVectors);
    sync_block();
    store_codes(run);
}
