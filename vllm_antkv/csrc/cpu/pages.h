// Where the rows of a request are: tokens of the step in hand, others in pages.
#pragma once

#include <algorithm>

#include "antkv.h"
#include "simd.h"

namespace antkv {

constexpr int kBlockSize = 128;  // tokens of a VQ block
// Added to the offset of an anchor that is kept as it is (EXACT_ANCHOR of vllm_antkv/select/anchors.py).
constexpr int kExactAnchor = 128;
constexpr int kMaxHeadSize = 256;
constexpr int kMaxGroup = 64;  // query heads per KV head (MAX_GROUP of vllm_antkv/ops/cpu.py)

inline int element_size(const antkv_layer& layer) { return layer.dtype == ANTKV_FLOAT32 ? 4 : 2; }

inline int num_queries_per_kv(const antkv_layer& layer) { return layer.num_heads / layer.num_kv_heads; }

// `size` elements as float32; size is a multiple of W.
inline void widen(const antkv_layer& layer, const void* from, int size, float* to) {
    switch (layer.dtype) {
        case ANTKV_FLOAT32: return widen<Float32>((const float*)from, size, to);
        case ANTKV_FLOAT16: return widen<Float16>((const uint16_t*)from, size, to);
        default: return widen<BFloat16>((const uint16_t*)from, size, to);
    }
}

inline void narrow(const antkv_layer& layer, const float* from, int size, void* to) {
    for (int c = 0; c < size; c += W) {
        switch (layer.dtype) {
            case ANTKV_FLOAT32: Float32::store((float*)to + c, load(from + c)); break;
            case ANTKV_FLOAT16: Float16::store((uint16_t*)to + c, load(from + c)); break;
            default: BFloat16::store((uint16_t*)to + c, load(from + c));
        }
    }
}

inline uint8_t* row_of(const antkv_layer& layer, antkv_rows rows, int64_t token, int head) {
    return (uint8_t*)rows.data + (token * rows.stride + (int64_t)head * layer.head_size) * element_size(layer);
}

// A VQ page of one KV head.
struct VQPage {
    uint8_t* data;
    const antkv_layer& layer;

    uint8_t* codes(bool of_values, int offset) const {
        return data + (of_values ? layer.v_codes : 0) + (int64_t)offset * layer.code_bytes;
    }
    // E4M3: what the code of the anchor loses. Two of them hold a row that is kept as it is.
    uint8_t* anchor(bool of_values, int row) const {
        const int64_t row_bytes = layer.head_size * element_size(layer) / 2;
        return data + (of_values ? layer.v_anchors : layer.k_anchors) + row * row_bytes;
    }
    int16_t* anchor_offsets(bool of_values) const {
        return (int16_t*)(data + layer.anchor_offsets) + (of_values ? layer.anchor_rows : 0);
    }
};

// One request's part of a step, seen by one KV head: tokens start .. end are rows first ... of the step's tensors.
struct Sequence {
    const antkv_layer& layer;
    const antkv_step& step;
    int request, head;
    int first, start, end;

    Sequence(const antkv_layer& layer, const antkv_step& step, int request, int head)
        : layer(layer), step(step), request(request), head(head) {
        first = step.query_start_loc[request];
        end = step.seq_lens[request];
        start = end - (step.query_start_loc[request + 1] - first);
    }
    // As it is for a query of the step, which sees nothing behind it.
    Sequence until(int query) const {
        Sequence sequence = *this;
        sequence.end = query + 1;
        return sequence;
    }
    // Row of the last token.
    int last_row() const { return first + end - 1 - start; }

    VQPage vq_page(int block) const {
        const int64_t id = step.vq_block_table[request * step.vq_table_stride + block];
        return {layer.vq + id * layer.vq_block_stride + head * layer.vq_head_stride, layer};
    }

    // The three positions of a token of a layer that has them.
    const int32_t* three_positions(int position) const {
        const int64_t id = step.vq_block_table[request * step.vq_table_stride + position / kBlockSize];
        return layer.positions + id * layer.position_stride + position % kBlockSize * 3;
    }
    // By which position K of a token rotates, if K of `count` tokens from it on rotates by one more each; else -1. It is where
    // the token stands in the sequence; where tokens have three positions, those of a text are three times the same.
    int first_of_run(int position, int count) const {
        if (!layer.positions) return position;
        const int first = three_positions(position)[0];
        for (int t = 0; t < count; ++t) {
            const int32_t* three = three_positions(position + t);
            if (three[0] != first + t || three[1] != first + t || three[2] != first + t) return -1;
        }
        return first;
    }

    // The recency page of a token, or null where it has none.
    uint8_t* recency_page(int position) const {
        const int page = position >> __builtin_ctz(layer.recency_block_size);
        const int64_t id = step.recency_block_table[request * step.recency_table_stride + page];
        return id ? layer.recency + id * layer.recency_block_stride + head * layer.recency_head_stride : nullptr;
    }
    uint8_t* recency_row(uint8_t* page, bool of_values, int position) const {
        const int64_t offset = recency_offset(position);
        return page + (of_values ? layer.recency_v : 0) + offset * layer.head_size * element_size(layer);
    }
    int recency_offset(int position) const { return position & (layer.recency_block_size - 1); }
    // Of a token of a page, as they are after the query at `query`.
    float* recency_scores(uint8_t* page, int position, int query, bool of_values) const {
        const int row = query % layer.score_slots * 2 + of_values;
        return (float*)(page + layer.recency_scores) + row * layer.recency_block_size + recency_offset(position);
    }

    // Full-precision K (or V) row of a token: from the step's tensor where it is in hand, else from its page.
    const void* exact_row(antkv_rows in_hand, bool of_values, int position) const {
        if (position >= start) return row_of(layer, in_hand, first + position - start, head);
        uint8_t* page = recency_page(position);
        return page ? recency_row(page, of_values, position) : missing_row();
    }

    // Both of a token.
    struct ExactRows {
        const uint8_t *key, *value;
    };
    ExactRows exact_rows(antkv_rows key, antkv_rows value, int position) const {
        if (position >= start) {
            const int row = first + position - start;
            return {row_of(layer, key, row, head), row_of(layer, value, row, head)};
        }
        uint8_t* page = recency_page(position);
        if (!page) return {missing_row(), missing_row()};
        return {recency_row(page, false, position), recency_row(page, true, position)};
    }
    // Zeros, and a mark for the request: the row's page is the null block, which no allocator of pages may let happen.
    [[gnu::cold, gnu::noinline]] const uint8_t* missing_row() const {
        alignas(64) static constexpr uint8_t kZeros[kMaxHeadSize * sizeof(float)] = {};
        __atomic_store_n(&layer.missing_rows[request], 1, __ATOMIC_RELAXED);
        return kZeros;
    }

    // Position of the first token that the query at position `query` sees, and of the last query that sees a token.
    int first_visible(int query) const { return std::max(query - layer.window + 1, 0); }
    int last_that_sees(int position) const { return position + layer.window - 1; }
    // Whether it sees a token that is not behind it in full precision, or through its code.
    bool sees_exactly(int query, int position) const { return in_window(query, position) && exact_for(query, position); }
    bool sees_code(int query, int position) const { return in_window(query, position) && !exact_for(query, position); }
    // The latter of a query behind the prompt, for tokens begin .. begin + count of its window.
    void seen_through_codes(int query, int begin, int count, bool* coded) const {
        const int32_t* last_query = layer.last_query + begin;
        for (int t = 0; t < count; ++t) coded[t] = last_query[t] < query;
    }

  private:
    bool in_window(int query, int position) const { return query - position < layer.window; }
    bool exact_for(int query, int position) const {
        return layer.last_query[position] >= (layer.prefill_reads_cache ? query : start);
    }
};

}  // namespace antkv
