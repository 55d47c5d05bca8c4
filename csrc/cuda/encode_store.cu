// Codes of the step's tokens into VQ pages, their full-precision rows into recency pages.
//
// A warp holds centroids of one sub-vector in registers, a few per lane, and passes tokens by them: in float32, since
// rounding a row would choose other codes than the reference.
#include "layer.cuh"

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRun = 16;  // tokens of a CTA: centroids are read once for all of them
ANTKV_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
// Centroids that a lane holds at a time: 64 registers.
constexpr int kPerLane = smaller(64 / kSubVector, kCentroids / kWarp);

struct alignas(smaller(kSubVector * 2, 16)) Centroid {
    u16 channels[kSubVector];
};

struct Shared {
    float rows[kRun][kHeadSize];
    u16 codes[kRun][kSubVectors];
    int request[kRun], position[kRun];
};

static_assert(sizeof(Shared) == ANTKV_ENCODE_SHARED, "vllm_antkv/ops/cuda.py counts otherwise");

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
    request = low;
    position = step.seq_lens[low] - (step.query_start_loc[low + 1] - token);
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
        ((uint4*)(row + (run.of_values ? run.layer.recency_v : 0)))[chunk] = from[chunk];
    }
}

ANTKV_DEVICE void load_rows(const Run& run) {
    for (int item = (int)threadIdx.x; item < run.count * kHeadSize; item += kThreads) {
        const int t = item / kHeadSize, channel = item % kHeadSize;
        run.shared.rows[t][channel] = to_float(run.in_hand.at(run.first + t, run.head)[channel]);
    }
}

// K as it was before RoPE.
ANTKV_DEVICE void unrotate(const Run& run) {
    const Layer& layer = run.layer;
    const int half = layer.rotary_dim / 2;
    for (int item = (int)threadIdx.x; item < run.count * half; item += kThreads) {
        const int t = item / half, c = item % half;
        const i64 at = (i64)run.shared.position[t] * half + c;
        const float cos = layer.cos[at], sin = layer.sin[at], norm = cos * cos + sin * sin;
        float& first = run.shared.rows[t][layer.is_neox_style ? c : 2 * c];
        float& second = run.shared.rows[t][layer.is_neox_style ? c + half : 2 * c + 1];
        const float a = first, b = second;
        first = (a * cos + b * sin) / norm;
        second = (b * cos - a * sin) / norm;
    }
}

// Nearest centroid of sub-vector `s` of every row; equal distances take the lower index.
ANTKV_DEVICE void nearest(const Run& run, int s) {
    const Layer& layer = run.layer;
    const int lane = (int)threadIdx.x % kWarp;
    const i64 table = ((i64)run.head * kSubVectors + s) * kCentroids;
    const Centroid* centroids = (const Centroid*)(run.of_values ? layer.v_centroids : layer.k_centroids) + table;
    const float* half_norms = (run.of_values ? layer.v_half_norms : layer.k_half_norms) + table;
    float best[kRun];
    int code[kRun];
#pragma unroll
    for (int t = 0; t < kRun; ++t) best[t] = ANTKV_INFINITY, code[t] = 0;
    for (int first = lane; first < kCentroids; first += kWarp * kPerLane) {
        float held[kPerLane][kSubVector], half_norm[kPerLane];
#pragma unroll
        for (int j = 0; j < kPerLane; ++j) {
            const Centroid centroid = centroids[first + j * kWarp];
            half_norm[j] = half_norms[first + j * kWarp];
#pragma unroll
            for (int k = 0; k < kSubVector; ++k) held[j][k] = f16_to_float(centroid.channels[k]);
        }
#pragma unroll
        for (int t = 0; t < kRun; ++t) {
            if (t >= run.count) break;
            const float* row = run.shared.rows[t] + s * kSubVector;
#pragma unroll
            for (int j = 0; j < kPerLane; ++j) {
                float distance = half_norm[j];
#pragma unroll
                for (int k = 0; k < kSubVector; ++k) distance -= row[k] * held[j][k];
                if (distance < best[t]) best[t] = distance, code[t] = first + j * kWarp;
            }
        }
    }
#pragma unroll
    for (int t = 0; t < kRun; ++t) {
        for (int mask = kWarp / 2; mask; mask /= 2) {
            const float distance = from_lane_xor(best[t], mask);
            const int other = from_lane_xor(code[t], mask);
            if (distance < best[t] || (distance == best[t] && other < code[t])) best[t] = distance, code[t] = other;
        }
        if (lane == 0 && t < run.count) run.shared.codes[t][s] = (u16)code[t];
    }
}

// Byte `at` of a packed row; 12-bit codes lie two in three bytes.
ANTKV_DEVICE u8 packed_byte(const u16* codes, int at) {
    if constexpr (kCentroids == 256) return (u8)codes[at];
    const int pair = at / 3 * 2;
    const int first = codes[pair], second = pair + 1 < kSubVectors ? codes[pair + 1] : 0;
    if (at % 3 == 0) return (u8)first;
    return at % 3 == 1 ? (u8)(first >> 8 | (second & 0xf) << 4) : (u8)(second >> 4);
}

ANTKV_DEVICE void store_codes(const Run& run) {
    for (int item = (int)threadIdx.x; item < run.count * kCodeBytes; item += kThreads) {
        const int t = item / kCodeBytes, at = item % kCodeBytes;
        u8* codes = page_of(run, t) + (run.of_values ? run.layer.v_codes : 0);
        codes[(run.shared.position[t] % kBlockSize) * kCodeBytes + at] = packed_byte(run.shared.codes[t], at);
    }
}

}  // namespace

// Grid: (runs of 16 tokens, num_kv_heads, K and V).
ANTKV_KERNEL(kThreads)
antkv_encode_store(ANTKV_ARGUMENT(Layer) layer, ANTKV_ARGUMENT(Step) step, Rows key, Rows value) {
    ANTKV_DYNAMIC_SHARED(memory);
    Shared& shared = *(Shared*)memory;
    const int first = (int)blockIdx.x * kRun, num_tokens = step.query_start_loc[step.num_reqs];
    if (first >= num_tokens) return;
    const bool of_values = blockIdx.z == 1;
    const int count = smaller(kRun, num_tokens - first);
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
    for (int s = (int)threadIdx.x / kWarp; s < kSubVectors; s += kWarps) nearest(run, s);
    sync_block();
    store_codes(run);
}
