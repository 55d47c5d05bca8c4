// The layer that the kernels are compiled for, and what Python (vllm_antkv/ops/cuda_arguments.py) hands them.
//
// Sizes are compile-time constants: Python compiles once per kind of layer, and reads the structures from here.
#pragma once

#include "device.cuh"

constexpr int kHeadSize = ANTKV_HEAD_SIZE;
constexpr int kGroup = ANTKV_GROUP;            // query heads per KV head
constexpr int kSubVector = ANTKV_SUB_VECTOR;   // channels
constexpr int kCentroids = ANTKV_CENTROIDS;    // per sub-vector
constexpr bool kBFloat16 = ANTKV_BFLOAT16;     // else float16: the model dtype
constexpr int kSubVectors = kHeadSize / kSubVector;
constexpr int kCodeBytes = kCentroids == 256 ? kSubVectors : (kSubVectors * 12 + 7) / 8;
constexpr int kBlockSize = 128;                // tokens of a VQ block
// Added to the offset of an anchor that is kept as it is (EXACT_ANCHOR of vllm_antkv/select/anchors.py).
constexpr int kExactAnchor = 128;
constexpr int kRowBytes = kHeadSize * 2;

// Everything that no step changes. Strides and section offsets are in bytes; vllm_antkv/cache/pages.py lays pages out.
struct Layer {
    u8* vq;  // K codes at 0 of each page, then the sections below
    i64 vq_block_stride, vq_head_stride;
    i64 v_codes, k_anchors, v_anchors, anchor_offsets;
    u8* recency;  // K rows at 0, then V rows, scores of K and scores of V
    i64 recency_block_stride, recency_head_stride, recency_v, recency_scores;
    const u16 *k_centroids, *v_centroids;       // (num_kv_heads, sub_vectors, centroids, sub_vector_size) float16
    const float *k_half_norms, *v_half_norms;   // (num_kv_heads, sub_vectors, centroids)
    const u8* tables;                           // (num_kv_heads, bytes): of `StagedTables` or `CachedTables`
    const float *k_scales, *v_scales;           // of tables of 4,096 centroids, in e4m3: (num_kv_heads, sub_vectors)
    const float *cos, *sin;                     // (rotary_rows, rotary_dim / 2); null without RoPE
    const i32* k_order;                         // (head_size) channel of K at each place of decoded rows; null: the same
    const i32* last_query;                      // (max_model_len)
    const float* jensen_weights;                // (num_heads, head_size): of `Span::bias`
    float scale, rotary_magnitude;
    i32 num_kv_heads, rotary_dim, is_neox_style, rotary_rows;
    i32 recency_block_size, anchor_rows;
    i32 split;                                  // tokens of a split, whatever the batch
    i32 staged_bytes;                           // of a page that decoding brings at once: its codes, or all of it
    i32 num_blocks;                             // pages of codes; of recent rows there are no more
    i32 score_slots;                            // one more than there are drafts in a step
    i32* missing_rows;                          // (max_num_reqs): see Counters in vllm_antkv/ops/counters.py
};

// What a step computes; see vllm_antkv/ops/step.py. Table strides are in entries.
struct Step {
    const i32 *query_start_loc, *seq_lens, *vq_block_table, *recency_block_table;
    i64 vq_table_stride, recency_table_stride, num_reqs;
};

// (num_tokens, heads, head_size): heads lie side by side, `stride` elements from token to token.
struct Rows {
    u16* data;
    i64 stride;
    ANTKV_DEVICE u16* at(i64 token, int head) const { return data + token * stride + (i64)head * kHeadSize; }
};

// Where decoding writes.
struct Results {
    Rows output;
    float* partials;  // (capacity, num_kv_heads, kPartial): of the items of `SplitScheduler`
    u32* written;     // (capacity, num_kv_heads): splits of the query whose first item it is; 0 between launches
    i64 capacity;
    const u8* is_sink;  // (num_tokens) of 0 and 1, or null; for votes
    i32 votes;          // add those of single tokens on their own blocks to the scores
};

ANTKV_DEVICE float to_float(u16 element) { return kBFloat16 ? bf16_to_float(element) : f16_to_float(element); }
// Two elements of the model dtype.
ANTKV_DEVICE u32 pack(float first, float second) {
    return kBFloat16 ? pack_bf16(first, second) : pack_f16(first, second);
}

// Where rows in full precision have the channel of K that stands at a place of decoded rows.
ANTKV_DEVICE int channel_at(const Layer& layer, int place) {
    const int channel = layer.k_order ? layer.k_order[place] : place;
    ANTKV_EXPECT(channel >= 0 && channel < kHeadSize);
    return channel;
}

ANTKV_DEVICE u8* vq_page(const Layer& layer, const Step& step, int request, int head, int block) {
    ANTKV_EXPECT(request >= 0 && request < step.num_reqs && block >= 0 && block < step.vq_table_stride);
    const i64 id = step.vq_block_table[request * step.vq_table_stride + block];
    ANTKV_EXPECT(id >= 0 && id < layer.num_blocks);
    return layer.vq + id * layer.vq_block_stride + head * layer.vq_head_stride;
}

// Page `index` of a request, or null where it is the null block.
ANTKV_DEVICE u8* recency_page(const Layer& layer, const Step& step, int request, int head, int index) {
    ANTKV_EXPECT(request >= 0 && request < step.num_reqs && index >= 0 && index < step.recency_table_stride);
    const i64 id = step.recency_block_table[request * step.recency_table_stride + index];
    ANTKV_EXPECT(id >= 0 && id < layer.num_blocks);
    return id ? layer.recency + id * layer.recency_block_stride + head * layer.recency_head_stride : nullptr;
}

// The recency row (K; V lies `recency_v` behind) of a token, or null where its page is the null block.
ANTKV_DEVICE u8* recency_row(const Layer& layer, const Step& step, int request, int head, int position) {
    u8* page = recency_page(layer, step, request, head, position / layer.recency_block_size);
    return page ? page + (position % layer.recency_block_size) * kRowBytes : nullptr;
}
