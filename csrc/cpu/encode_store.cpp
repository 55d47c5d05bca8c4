// Codes of the step's tokens into VQ pages, their full-precision rows into recency pages.
#include <cstring>
#include <vector>

#include "memory.h"
#include "codes.h"

namespace antkv {
namespace {

constexpr int kRun = 8;  // tokens encoded together, so that a centroid is loaded once for all of them
constexpr int kMaxHead = 256;

// Nearest centroids of sub-vectors, (size, kRun); equal distances take the lower index. kVectors vectors of centroids are
// compared at a time, so that a product need not wait for the one before where there are few tokens.
template <int kTokens, int kVectors>
void nearest(const antkv_layer& layer, const uint16_t* columns, const float* half_norms, const float* sub_vectors,
             int* codes) {
    const int size = layer.sub_vector_size, count = layer.num_centroids;
    Vec best[kTokens], best_code[kTokens] = {}, code;  // codes are whole numbers
    for (int t = 0; t < kTokens; ++t) best[t] = broadcast(kInfinity);
    for (int lane = 0; lane < W; ++lane) code[lane] = lane;
    for (int c = 0; c < count; c += kVectors * W) {
        Vec distance[kTokens][kVectors];
        for (int v = 0; v < kVectors; ++v)
            for (int t = 0; t < kTokens; ++t) distance[t][v] = load(half_norms + c + v * W);
        for (int k = 0; k < size; ++k) {
            for (int v = 0; v < kVectors; ++v) {
                const Vec column = Float16::load(columns + (int64_t)k * count + c + v * W);
                for (int t = 0; t < kTokens; ++t)
                    distance[t][v] -= broadcast(sub_vectors[k * kRun + t]) * column;
            }
        }
        for (int v = 0; v < kVectors; ++v, code += W) {
            for (int t = 0; t < kTokens; ++t) {
                best_code[t] = distance[t][v] < best[t] ? code : best_code[t];
                best[t] = distance[t][v] < best[t] ? distance[t][v] : best[t];
            }
        }
    }
    for (int t = 0; t < kTokens; ++t) {
        const Vec winners = best[t] == smallest(best[t]) ? best_code[t] : broadcast(kInfinity);
        codes[t] = (int)smallest(winners);
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
    if (layer.rotary_magnitude == 1) return;
    const float factor = 1 / (layer.rotary_magnitude * layer.rotary_magnitude);
    for (int c = 0; c < layer.rotary_dim; ++c) row[c] *= factor;
}

// A token of the step: which request's, and where in it.
struct Token {
    int request, position;
};

// Codes of tokens first .. first + count of the step, whosever they are.
void store_codes(const antkv_layer& layer, const antkv_step& step, const Token* tokens, int64_t first, int count,
                 int head, antkv_rows in_hand, bool of_values) {
    const int size = layer.head_size, num_sub_vectors = size / layer.sub_vector_size;
    const uint16_t* columns = (of_values ? layer.v_columns : layer.k_columns) + (int64_t)head * layer.num_centroids * size;
    const float* half_norms = of_values ? layer.v_half_norms : layer.k_half_norms;
    half_norms += (int64_t)head * layer.num_centroids * num_sub_vectors;
    alignas(64) float row[kMaxHead], rows[kMaxHead * kRun] = {};  // channel by channel
    int codes[kMaxHead][kRun];
    for (int t = 0; t < count; ++t) {
        widen(layer, row_of(layer, in_hand, first + t, head), size, row);
        if (!of_values) {
            to_code_order(layer, row);
            unrotate(layer, tokens[t].position, row);
        }
        float* to = rows + t;
        for (int c = 0; c < size; ++c, to += kRun) *to = row[c];
    }
    for (int s = 0; s < num_sub_vectors; ++s) {
        const float* sub_vectors = rows + s * layer.sub_vector_size * kRun;
        if (count == 1)
            nearest<1, 8>(layer, columns, half_norms, sub_vectors, codes[s]);
        else if (count <= 4)
            nearest<4, 2>(layer, columns, half_norms, sub_vectors, codes[s]);
        else
            nearest<kRun, 1>(layer, columns, half_norms, sub_vectors, codes[s]);
        columns += (int64_t)layer.num_centroids * layer.sub_vector_size;
        half_norms += layer.num_centroids;
    }
    for (int t = 0; t < count; ++t) {
        int coded[kMaxHead];
        for (int s = 0; s < num_sub_vectors; ++s) coded[s] = codes[s][t];
        const VQPage page = Sequence(layer, step, tokens[t].request, head).vq_page(tokens[t].position / kBlockSize);
        pack(layer, coded, num_sub_vectors, page.codes(of_values, tokens[t].position % kBlockSize));
    }
}

void store_rows(const Sequence& sequence, int position, antkv_rows key, antkv_rows value) {
    const antkv_layer& layer = sequence.layer;
    if (position % kBlockSize == 0) {
        // Blocks fill from their first token, so whoever had the block before left its anchors until here.
        int16_t* offsets = sequence.vq_page(position / kBlockSize).anchor_offsets(false);
        std::fill_n(offsets, 2 * layer.anchor_rows, (int16_t)-1);
    }
    uint8_t* page = sequence.recency_page(position);
    if (!page) return;
    const int row_bytes = layer.head_size * element_size(layer);
    std::memcpy(sequence.recency_row(page, false, position), sequence.exact_row(key, false, position), row_bytes);
    std::memcpy(sequence.recency_row(page, true, position), sequence.exact_row(value, true, position), row_bytes);
}

}  // namespace
}  // namespace antkv

extern "C" void antkv_encode_store(const antkv_layer* layer, const antkv_step* step, antkv_rows key, antkv_rows value) {
    using namespace antkv;
    std::vector<Token> tokens;
    tokens.reserve(step->query_start_loc[step->num_reqs]);
    for (int request = 0; request < step->num_reqs; ++request) {
        const Sequence sequence(*layer, *step, request, 0);
        for (int position = sequence.start; position < sequence.end; ++position) tokens.push_back({request, position});
    }
    const int64_t num_tokens = tokens.size(), num_runs = (num_tokens + kRun - 1) / kRun;
    // Head by head, so that a thread keeps the centroids of one in its cache.
#pragma omp parallel for collapse(3) schedule(static)
    for (int head = 0; head < layer->num_kv_heads; ++head) {
        for (int kind = 0; kind < 2; ++kind) {
            for (int64_t run = 0; run < num_runs; ++run) {
                const int64_t first = run * kRun;
                const int count = (int)std::min<int64_t>(kRun, num_tokens - first);
                store_codes(*layer, *step, &tokens[first], first, count, head, kind ? value : key, kind);
                for (int t = 0; kind == 0 && t < count; ++t)
                    store_rows(Sequence(*layer, *step, tokens[first + t].request, head), tokens[first + t].position,
                               key, value);
            }
        }
    }
}
