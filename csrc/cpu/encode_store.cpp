// Codes of the step's tokens into VQ pages, their full-precision rows into recency pages.
#include <cstring>
#include <vector>

#include "memory.h"
#include "codes.h"

namespace antkv {
namespace {

constexpr int kRun = 8;  // tokens encoded together, so that a centroid is loaded once for all of them
constexpr int kMaxHead = 256;

// Nearest centroid of sub-vector `s` of each row; equal distances take the lower index.
template <int kTokens>
void nearest(const antkv_layer& layer, const uint16_t* columns, const float* half_norms, const float* rows, int s,
             int* codes) {
    const int size = layer.sub_vector_size, count = layer.num_centroids;
    Vec best[kTokens];
    IntVec best_code[kTokens] = {};
    for (int t = 0; t < kTokens; ++t) best[t] = broadcast(kInfinity);
    IntVec code;
    for (int lane = 0; lane < W; ++lane) code[lane] = lane;
    for (int c = 0; c < count; c += W, code += W) {
        Vec distance[kTokens];
        for (int t = 0; t < kTokens; ++t) distance[t] = load(half_norms + c);
        for (int k = 0; k < size; ++k) {
            const Vec column = Float16::load(columns + (int64_t)k * count + c);
            for (int t = 0; t < kTokens; ++t)
                distance[t] -= broadcast(rows[t * layer.head_size + s * size + k]) * column;
        }
        for (int t = 0; t < kTokens; ++t) {
            best_code[t] = distance[t] < best[t] ? code : best_code[t];
            best[t] = distance[t] < best[t] ? distance[t] : best[t];
        }
    }
    for (int t = 0; t < kTokens; ++t) {
        int winner = 0;
        for (int lane = 1; lane < W; ++lane) {
            const bool nearer = best[t][lane] < best[t][winner];
            const bool equal = best[t][lane] == best[t][winner] && best_code[t][lane] < best_code[t][winner];
            if (nearer || equal) winner = lane;
        }
        codes[t] = best_code[t][winner];
    }
}

void pack(const antkv_layer& layer, const int* codes, int num_sub_vectors, uint8_t* to) {
    if (layer.num_centroids == 256) {
        for (int s = 0; s < num_sub_vectors; ++s) to[s] = (uint8_t)codes[s];
        return;
    }
    for (int s = 0; s < num_sub_vectors; s += 2) {
        const int first = codes[s], second = s + 1 < num_sub_vectors ? codes[s + 1] : 0;
        uint8_t* pair = to + s / 2 * 3;
        pair[0] = (uint8_t)first;
        pair[1] = (uint8_t)((first >> 8) | ((second & 0xF) << 4));
        if (s + 1 < num_sub_vectors) pair[2] = (uint8_t)(second >> 4);
    }
}

// K as it was before RoPE.
void unrotate(const antkv_layer& layer, int position, float* row) {
    if (!layer.cos) return;
    const Angles angles(layer, position);
    rotate(layer, row, angles.cos, angles.sin, -1);
    const int half = layer.rotary_dim / 2;
    for (int c = 0; c < half; ++c) {
        const float norm = angles.cos[c] * angles.cos[c] + angles.sin[c] * angles.sin[c];
        row[layer.is_neox_style ? c : 2 * c] /= norm;
        row[layer.is_neox_style ? c + half : 2 * c + 1] /= norm;
    }
}

void store_codes(const Sequence& sequence, int position, int count, antkv_rows in_hand, bool of_values) {
    const antkv_layer& layer = sequence.layer;
    const int size = layer.head_size, num_sub_vectors = size / layer.sub_vector_size;
    const int64_t head = sequence.head;
    const uint16_t* columns = (of_values ? layer.v_columns : layer.k_columns) + head * layer.num_centroids * size;
    const float* half_norms = of_values ? layer.v_half_norms : layer.k_half_norms;
    half_norms += head * layer.num_centroids * num_sub_vectors;
    alignas(64) float rows[kRun * kMaxHead] = {};
    int codes[kMaxHead][kRun];
    for (int t = 0; t < count; ++t) {
        widen(layer, sequence.exact_row(in_hand, of_values, position + t), size, rows + t * size);
        if (!of_values) unrotate(layer, position + t, rows + t * size);
    }
    for (int s = 0; s < num_sub_vectors; ++s) {
        if (count == 1)
            nearest<1>(layer, columns, half_norms, rows, s, codes[s]);
        else
            nearest<kRun>(layer, columns, half_norms, rows, s, codes[s]);
        columns += (int64_t)layer.num_centroids * layer.sub_vector_size;
        half_norms += layer.num_centroids;
    }
    for (int t = 0; t < count; ++t) {
        int row[kMaxHead];
        for (int s = 0; s < num_sub_vectors; ++s) row[s] = codes[s][t];
        const VQPage page = sequence.vq_page((position + t) / kBlockSize);
        pack(layer, row, num_sub_vectors, page.codes(of_values, (position + t) % kBlockSize));
    }
}

void store_tokens(const Sequence& sequence, int position, int count, antkv_rows key, antkv_rows value) {
    const antkv_layer& layer = sequence.layer;
    const int row_bytes = layer.head_size * element_size(layer);
    for (int p = position; p < position + count; ++p) {
        if (p % kBlockSize == 0) {
            // Blocks fill from their first token, so whoever had the block before left its anchors until here.
            int16_t* offsets = sequence.vq_page(p / kBlockSize).anchor_offsets(false);
            std::fill_n(offsets, 2 * layer.anchor_rows, (int16_t)-1);
        }
        uint8_t* page = sequence.recency_page(p);
        if (!page) continue;
        std::memcpy(sequence.recency_row(page, false, p), sequence.exact_row(key, false, p), row_bytes);
        std::memcpy(sequence.recency_row(page, true, p), sequence.exact_row(value, true, p), row_bytes);
    }
    store_codes(sequence, position, count, key, false);
    store_codes(sequence, position, count, value, true);
}

struct Task {
    int head, request, position;
};

}  // namespace
}  // namespace antkv

extern "C" void antkv_encode_store(const antkv_layer* layer, const antkv_step* step, antkv_rows key, antkv_rows value) {
    using namespace antkv;
    std::vector<Task> tasks;
    for (int head = 0; head < layer->num_kv_heads; ++head) {
        for (int request = 0; request < step->num_reqs; ++request) {
            const Sequence sequence(*layer, *step, request, head);
            for (int position = sequence.start; position < sequence.end; position += kRun)
                tasks.push_back({head, request, position});
        }
    }
#pragma omp parallel for schedule(static)
    for (size_t i = 0; i < tasks.size(); ++i) {
        const Sequence sequence(*layer, *step, tasks[i].request, tasks[i].head);
        store_tokens(sequence, tasks[i].position, std::min(kRun, sequence.end - tasks[i].position), key, value);
    }
}
