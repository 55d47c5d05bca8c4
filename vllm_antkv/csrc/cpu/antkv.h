// C interface of the CPU kernels. Python reads the structures from here (vllm_antkv/ops/c_structs.py) and fills them.
//
// Pages are laid out by vllm_antkv/cache/pages.py. "Element" below is the model dtype: float32, float16 or bfloat16.
#pragma once

#include <cstdint>

extern "C" {

enum antkv_dtype : int32_t { ANTKV_FLOAT32 = 0, ANTKV_FLOAT16 = 1, ANTKV_BFLOAT16 = 2 };

// What multiplies tiles of bfloat16 (tiles/tiles.h). A build has plain tiles or the two others or none.
enum antkv_tiles : int32_t { ANTKV_NO_TILES = 0, ANTKV_PLAIN_TILES = 1, ANTKV_AVX512_BF16 = 2, ANTKV_AMX = 3 };

// Longer than any sequence, and by so much less than 2^31 that it can be added to a position.
constexpr int32_t ANTKV_NO_WINDOW = 1 << 30;

// Everything about a layer that no step changes. Strides and section offsets are in bytes.
struct antkv_layer {
    uint8_t* vq;  // VQ pages: K codes at 0, then the sections below
    int64_t vq_block_stride, vq_head_stride;
    int64_t v_codes, k_anchors, v_anchors, anchor_offsets;
    uint8_t* recency;  // recency pages: K rows at 0, then the sections below
    int64_t recency_block_stride, recency_head_stride;
    int64_t recency_v, recency_scores;
    // (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16
    const uint16_t *k_centroids, *v_centroids;
    const uint16_t* v_bfloat16;  // v_centroids rounded to bfloat16; null without tiles
    // k_centroids and angles as whole numbers, see vllm_antkv/ops/fixed_point.py; null where float32 or tiles multiply keys
    const int16_t *k_fixed, *fixed_angles;
    const float* k_units;
    // Of 256 centroids: as (num_kv_heads, num_sub_vectors, sub_vector_size, num_centroids), and their squared norms / 2,
    // (num_kv_heads, num_sub_vectors, num_centroids)
    const uint16_t *k_columns, *v_columns;
    const float *k_half_norms, *v_half_norms;
    // Of 4,096 centroids, see vllm_antkv/ops/byte_tables.py; null for the others
    const uint8_t *k_bytes, *v_bytes;
    const float *k_middles, *v_middles, *k_limits, *v_limits;
    const float *cos, *sin;  // (max_position, rotary_dim / 2); null without RoPE
    const int32_t* k_order;  // (head_size) channel of K at each place of a coded row; null where they are the same
    const int32_t* last_query;  // (max_model_len)
    // (num_heads, head_size), see jensen_bias in vllm_antkv/ops/reference.py, over `scale`: for products that are not scaled
    // yet; null without
    const float* jensen_weights;
    const float* sinks;  // (num_heads) learned logits that take part in every softmax; null without
    // Where tokens have three positions (M-RoPE), else null: those of the tokens of VQ page 0, (kBlockSize, 3), and by which
    // of the three each pair of channels rotates, (rotary_dim / 2).
    const int32_t *positions, *sections;
    int64_t position_stride;  // from page to page, in entries
    float scale;
    float soft_cap;  // logits become soft_cap tanh(logit / soft_cap); 0 without
    float rotary_magnitude;  // of every entry, (cos^2 + sin^2)^1/2: 1 but for YaRN and LongRoPE
    int32_t dtype;
    int32_t num_heads, num_kv_heads, head_size;
    int32_t rotary_dim, is_neox_style;
    int32_t sub_vector_size, num_centroids, code_bytes;
    int32_t recency_block_size;  // a power of two
    int32_t anchor_rows, prefix;
    int32_t score_slots;  // Anchor Scores that a recency page has of a token (vllm_antkv/cache/pages.py)
    int32_t has_anchors;  // else sinks alone take anchor rows
    int32_t exact_anchors;  // all anchors are kept as they are, as sinks are: in two anchor rows each
    int32_t prefill_reads_cache;
    int32_t window;  // tokens that a query sees, itself included; ANTKV_NO_WINDOW where all
    int32_t tiles;  // antkv_tiles; float32 arithmetic without
    // (max_num_reqs), set for requests that lack a row: see Counters in vllm_antkv/ops/counters.py
    int32_t* missing_rows;
};

// What a step computes; see vllm_antkv/ops/step.py. Table strides are in entries.
struct antkv_step {
    const int32_t *query_start_loc, *seq_lens;
    const int32_t *vq_block_table, *recency_block_table;
    int64_t vq_table_stride, recency_table_stride, num_reqs;
};

// (num_tokens, heads, head_size) elements; heads lie side by side, `stride` elements from token to token.
struct antkv_rows {
    void* data;
    int64_t stride;
};

// How often an operation ran, and for how long.
struct antkv_timing {
    int64_t calls;
    double seconds;
};

// A step's rows of a layer.
struct antkv_work {
    antkv_rows query, key, value, output;
    const uint8_t* is_sink;        // (num_tokens) bytes, or null
    const uint8_t* is_prefilling;  // (num_reqs) bytes, requests whose new tokens are of their prompts; null: those with several
    antkv_timing* timings;         // of encode_store, anchor_score and attend; added to
};

// Problems of k-means, one behind the other; see vllm_antkv/ops/cpu_clusters.py. Strides are in entries.
struct antkv_clusters {
    const float *rows, *weights;  // (num_points, size + 1), points followed by a 1; (num_points)
    int64_t rows_stride, weights_stride;
    const float *columns, *half_norms;  // (size, num_centroids); (num_centroids)
    double* sums;  // (num_centroids, size + 1), of weighted rows; added to
    float* distances;  // (num_points), of the nearest centroid c to a point x: |c|^2 / 2 - c.x
    int64_t num_problems, num_points;
    int32_t size, num_centroids;  // centroids are a multiple of 16
};

// All that a layer does in a step, see LayerOperations in vllm_antkv/ops/layer.py. Returns the anchor rows chosen, K and V.
int64_t antkv_run(const antkv_layer*, const antkv_step*, const antkv_work*) noexcept;

// Attends alone.
void antkv_attend(const antkv_layer*, const antkv_step*, const antkv_work*) noexcept;

// A step of k-means; sub-vectors have at most 32 channels.
void antkv_cluster(const antkv_clusters*) noexcept;

// The digest of the sources of this build; see vllm_antkv/ops/cpu_sources.py.
const char* antkv_sources() noexcept;

// Whether this build has these antkv_tiles and they multiply a matrix right on this processor.
int32_t antkv_tiles_multiply_right(int32_t tiles) noexcept;
}
