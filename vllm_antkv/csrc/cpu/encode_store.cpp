// Codes of the step's tokens into VQ pages, their full-precision rows into recency pages.
#include <cstring>

#include "operations.h"
#include "memory.h"
#include "codes.h"
#include "nearest.h"
#include "nearest_bytes.h"
#include "nearest_tiles.h"
#include "row_tiles.h"

namespace antkv {
namespace {

constexpr int kTileRun = 1024;  // tokens that share what is made of the centroids for tiles
constexpr int kFewTokens = 64;  // fewer do not pay for it
// Vectors of centroids that one token is compared with at a time: all 256 with AVX-512, so that a column is read as it lies.
constexpr int kVectorsOfOne = W;

// Two codes in three bytes.
void pack_12_bits(const int* codes, int num_sub_vectors, uint8_t* to) {
    for (int s = 0; s < num_sub_vectors; s += 2) {
        const int first = codes[s], second = s + 1 < num_sub_vectors ? codes[s + 1] : 0;
        uint8_t* pair = to + s / 2 * 3;
        pair[0] = (uint8_t)first;
        pair[1] = (uint8_t)((first >> 8) | ((second & 0xF) << 4));
        if (s + 1 < num_sub_vectors) pair[2] = (uint8_t)(second >> 4);
    }
}

// K as it was before RoPE.
void unrotate(const Sequence& sequence, int position, float* row) {
    const antkv_layer& layer = sequence.layer;
    if (!layer.cos) return;
    const TokenAngles angles(sequence, position);
    rotate(layer, row, angles.cos, angles.sin, -1);
    if (layer.rotary_magnitude == 1) return;
    const float factor = 1 / (layer.rotary_magnitude * layer.rotary_magnitude);
    for (int c = 0; c < layer.rotary_dim; ++c) row[c] *= factor;
}

// A token of the step: which request's, and where in it.
struct Token {
    int request, position;
};

// The centroids of a KV head, and the rows that they code.
struct Kind {
    const antkv_layer& layer;
    const CodeOrder& order;
    const int head;
    const bool of_values;
    const antkv_rows in_hand;

    int num_sub_vectors() const { return layer.head_size / layer.sub_vector_size; }
    int64_t table(int sub_vector) const {
        return ((int64_t)head * num_sub_vectors() + sub_vector) * layer.num_centroids * layer.sub_vector_size;
    }
    const uint16_t* centroids(int s) const { return (of_values ? layer.v_centroids : layer.k_centroids) + table(s); }
    const float* half_norms(int s) const {
        return (of_values ? layer.v_half_norms : layer.k_half_norms) + table(s) / layer.sub_vector_size;
    }
    Columns<Float16> columns(int s) const {
        const uint16_t* centroids = (of_values ? layer.v_columns : layer.k_columns) + table(s);
        return {centroids, half_norms(s), layer.sub_vector_size, layer.num_centroids};
    }
    template <int kSize>
    ByteTable<kSize> bytes(int s) const {
        const int64_t index = (int64_t)head * num_sub_vectors() + s;
        constexpr int kBytes = ByteTable<kSize>::kCentroids / kLanes * ByteTable<kSize>::kBlock;
        return {(of_values ? layer.v_bytes : layer.k_bytes) + index * kBytes,
                (of_values ? layer.v_middles : layer.k_middles) + index * kSize,
                (of_values ? layer.v_limits : layer.k_limits) + index * 3, centroids(s)};
    }
    const void* row(int64_t index) const { return row_of(layer, in_hand, index, head); }
    // What is coded of `token`, which is in row `index` of the step.
    void load(const antkv_step& step, int64_t index, const Token& token, float* to) const {
        if (of_values) return widen(layer, row(index), layer.head_size, to);
        order.widen(row(index), to);
        unrotate(Sequence(layer, step, token.request, head), token.position, to);
    }
    uint8_t* codes(const antkv_step& step, const Token& token) const {
        const VQPage page = Sequence(layer, step, token.request, head).vq_page(token.position / kBlockSize);
        return page.codes(of_values, token.position % kBlockSize);
    }
};

// Codes of tokens first .. first + count of the step, whosever they are; of 256 centroids.
void store_codes(const Kind& kind, const antkv_step& step, const Token* tokens, int64_t first, int count) {
    const antkv_layer& layer = kind.layer;
    const int num_sub_vectors = kind.num_sub_vectors();
    alignas(64) float row[kMaxHeadSize], rows[kMaxHeadSize * kRun] = {};  // channel by channel
    float distances[kRun];
    int codes[kMaxHeadSize][kRun];
    for (int t = 0; t < count; ++t) {
        kind.load(step, first + t, tokens[t], row);
        float* to = rows + t;
        for (int c = 0; c < layer.head_size; ++c, to += kRun) *to = row[c];
    }
    for (int s = 0; s < num_sub_vectors; ++s) {
        const float* sub_vectors = rows + s * layer.sub_vector_size * kRun;
        const Columns<Float16> columns = kind.columns(s);
        if (count == 1)
            nearest<Float16, 1, kVectorsOfOne>(columns, sub_vectors, codes[s], distances);
        else if (count <= 4)
            nearest<Float16, 4, 2>(columns, sub_vectors, codes[s], distances);
        else
            nearest<Float16, kRun, 1>(columns, sub_vectors, codes[s], distances);
    }
    for (int t = 0; t < count; ++t) {
        uint8_t* to = kind.codes(step, tokens[t]);
        for (int s = 0; s < num_sub_vectors; ++s) to[s] = (uint8_t)codes[s][t];
    }
}

// The same where there are 4,096 centroids.
template <int kSize>
void store_codes_of_12_bits(const Kind& kind, const antkv_step& step, const Token* tokens, int64_t first, int count) {
    constexpr int kTogether = 4;
    const int num_sub_vectors = kind.num_sub_vectors();
    alignas(64) float rows[kRun * kMaxHeadSize];
    int codes[kMaxHeadSize / kSize][kRun];
    for (int t = 0; t < count; ++t) kind.load(step, first + t, tokens[t], rows + t * kMaxHeadSize);
    for (int s = 0; s < num_sub_vectors; ++s) {
        const ByteTable<kSize> table = kind.bytes<kSize>(s);
        const float* sub_vectors = rows + s * kSize;
        int t = 0;
        for (; t + kTogether <= count; t += kTogether)
            nearest_of_bytes<kTogether>(table, sub_vectors + t * kMaxHeadSize, kMaxHeadSize, codes[s] + t);
        for (; t < count; ++t) nearest_of_bytes<1>(table, sub_vectors + t * kMaxHeadSize, kMaxHeadSize, codes[s] + t);
    }
    for (int t = 0; t < count; ++t) {
        int coded[kMaxHeadSize / kSize];
        for (int s = 0; s < num_sub_vectors; ++s) coded[s] = codes[s][t];
        pack_12_bits(coded, num_sub_vectors, kind.codes(step, tokens[t]));
    }
}

// Codes of up to kTileRun tokens at once, of 256 centroids.
template <typename Tiles>
void store_codes(const Kind& kind, const antkv_step& step, const Token* tokens, int64_t first, int count,
                 NearestTiles<Tiles>& nearest_tiles) {
    const int size = kind.layer.head_size, sub_vector_size = kind.layer.sub_vector_size;
    const int num_sub_vectors = kind.num_sub_vectors();
    alignas(64) float rows[kLanes * kMaxHeadSize];
    for (int t = 0; t < rounded_up(count, 2 * kTileRows); t += kLanes) {
        const auto token = [&](int i) { return std::min(t + i, count - 1); };
        if (kind.of_values) {
            nearest_tiles.load_bfloat16_tokens(t, [&](int i) { return (const BFloat*)kind.row(first + token(i)); });
            continue;
        }
        for (int i = 0; i < kLanes; ++i) kind.load(step, first + token(i), tokens[token(i)], rows + i * size);
        nearest_tiles.load_tokens(t, rows);
    }
    constexpr int kInWord = 4;  // codes of a token that lie side by side
    alignas(64) uint32_t words[kMaxHeadSize / 2 / kInWord][kTileRun];
    for (int s = 0; s < num_sub_vectors; ++s) {
        const auto compare = [&](int t) {
            kind.load(step, first + t, tokens[t], rows);
            float sub_vector[16 * kRun], distance;
            for (int k = 0; k < sub_vector_size; ++k) sub_vector[k * kRun] = rows[s * sub_vector_size + k];
            int code;
            nearest<Float16, 1, kVectorsOfOne>(kind.columns(s), sub_vector, &code, &distance);
            return code;
        };
        const auto store = [&](int t, BitLanes codes) {
            BitLanes word = codes << s % kInWord * 8, before;
            std::memcpy(&before, words[s / kInWord] + t, sizeof before);
            if (s % kInWord) word |= before;
            std::memcpy(words[s / kInWord] + t, &word, sizeof word);
        };
        nearest_tiles.find(s, kind.centroids(s), kind.half_norms(s), count, kind.of_values, compare, store);
    }
    const int num_words = num_sub_vectors / kInWord;
    for (int t = 0; t < count;) {
        // Tokens of a block lie one behind the other.
        uint8_t* to = kind.codes(step, tokens[t]);
        const int end = std::min(count, t + kBlockSize - tokens[t].position % kBlockSize), request = tokens[t].request;
        for (; t < end && tokens[t].request == request; ++t, to += kind.layer.code_bytes) {
            for (int w = 0; w < num_words; ++w) std::memcpy(to + w * kInWord, &words[w][t], kInWord);
            for (int s = num_words * kInWord; s < num_sub_vectors; ++s)
                to[s] = (uint8_t)(words[num_words][t] >> s % kInWord * 8);
        }
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

Vector<Token> tokens_of(const antkv_layer& layer, const antkv_step& step) {
    Vector<Token> tokens;
    tokens.reserve(step.query_start_loc[step.num_reqs]);
    for (int request = 0; request < step.num_reqs; ++request) {
        const Sequence sequence(layer, step, request, 0);
        for (int position = sequence.start; position < sequence.end; ++position) tokens.push_back({request, position});
    }
    return tokens;
}

// Calls store(kind, first, count) for runs of tokens of every head, K and V, on the threads of a parallel region.
// Head by head, so that a thread keeps the centroids of one in its cache.
template <typename Store>
void for_runs(const antkv_layer& layer, const Vector<Token>& tokens, int length, antkv_rows key, antkv_rows value,
              Store store) {
    const CodeOrder order(layer);
    const int64_t num_tokens = tokens.size(), num_runs = (num_tokens + length - 1) / length;
#pragma omp for collapse(3) schedule(static)
    for (int head = 0; head < layer.num_kv_heads; ++head) {
        for (int of_values = 0; of_values < 2; ++of_values) {
            for (int64_t run = 0; run < num_runs; ++run) {
                const int64_t first = run * length;
                const int count = (int)std::min<int64_t>(length, num_tokens - first);
                store(Kind{layer, order, head, (bool)of_values, of_values ? value : key}, first, count);
            }
        }
    }
}

}  // namespace

void encode_store(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    const Vector<Token> tokens = tokens_of(layer, step);
    const int num_tokens = (int)tokens.size();
    bool coded = false;
    if (layer.dtype == ANTKV_BFLOAT16 && num_tokens >= kFewTokens) {
        with_tiles(layer, [&](auto tiles) {
            using Tiles = decltype(tiles);
            if constexpr (Tiles::kIsFast) {
                if (!(coded = NearestTiles<Tiles>::fits(layer))) return;
#pragma omp parallel
                {
                    [[maybe_unused]] const typename Tiles::Scope scope;
                    NearestTiles<Tiles> nearest_tiles(layer, std::min(kTileRun, rounded_up(num_tokens, 2 * kTileRows)));
                    for_runs(layer, tokens, kTileRun, work.key, work.value, [&](const Kind& kind, int64_t first, int count) {
                        store_codes(kind, step, &tokens[first], first, count, nearest_tiles);
                    });
                }
            }
        });
    }
#pragma omp parallel
    {
        if (!coded) {
            for_runs(layer, tokens, kRun, work.key, work.value, [&](const Kind& kind, int64_t first, int count) {
                if (layer.num_centroids == 256) store_codes(kind, step, &tokens[first], first, count);
                else if (layer.sub_vector_size == 16) store_codes_of_12_bits<16>(kind, step, &tokens[first], first, count);
                else store_codes_of_12_bits<32>(kind, step, &tokens[first], first, count);
            });
        }
#pragma omp for collapse(2) schedule(static)
        for (int head = 0; head < layer.num_kv_heads; ++head)
            for (int t = 0; t < num_tokens; ++t)
                store_rows(Sequence(layer, step, tokens[t].request, head), tokens[t].position, work.key, work.value);
    }
}

}  // namespace antkv
