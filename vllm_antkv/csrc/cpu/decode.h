#pragma once

#include "pages.h"

namespace antkv {

constexpr int kSplit = 2048;  // tokens of a split, whatever the batch: results do not depend on who else is served

// Attention of a request's only new token. Splits are independent of each other; `merge` comes after all of them.
struct Decode {
    // Splits are counted from the start of the sequence; those before the query's window are left out.
    static int first_split(const Sequence& sequence) { return sequence.first_visible(sequence.end - 1) / kSplit; }
    static int end_split(const Sequence& sequence) { return (sequence.end + kSplit - 1) / kSplit; }
    // Floats of a partial result: (group, head_size) output, (group) maximum, (group) sum.
    static int partial_size(const antkv_layer& layer) { return num_queries_per_kv(layer) * (layer.head_size + 2); }

    // Others' work has pushed tables of centroids out of the caches between two calls. Where so many tokens are decoded that
    // most centroids are asked for, tables are read from the first byte to the last before: memory gives that in less than
    // half the time of as many rows wherever they lie.
    static bool reads_tables(const antkv_layer& layer, int64_t num_coded) { return 4 * num_coded >= layer.num_centroids; }
    // Tokens that are seen before the last block, which are decoded, but for anchors.
    static int num_coded(const Sequence& sequence) {
        const int query = sequence.end - 1;
        return std::max(query / kBlockSize * kBlockSize - sequence.first_visible(query), 0);
    }
    static void read_tables(const antkv_layer&, int head);

    // Floats that `split` works in: logits, weights in another order of up to kWeightRows heads, and queries.
    static constexpr int kWeightRows = 16;
    static int scratch_size(const antkv_layer& layer) {
        return (num_queries_per_kv(layer) + kWeightRows) * kSplit + num_queries_per_kv(layer) * layer.head_size;
    }
    static void split(const Sequence&, const antkv_work&, int index, float* scratch, float* partial);
    static void merge(const Sequence&, antkv_rows output, const float* partials);
};

}  // namespace antkv
