#pragma once

#include "pages.h"

namespace antkv {

constexpr int kMaxGroup = 64;  // query heads per KV head
constexpr int kSplit = 2048;   // tokens of a split, whatever the batch: results do not depend on who else is served

// Attention of a request's only new token. Splits are independent of each other; `merge` comes after all of them.
struct Decode {
    static int num_splits(int seq_len) { return (seq_len + kSplit - 1) / kSplit; }
    // Floats of a partial result: (group, head_size) output, (group) maximum, (group) sum.
    static int partial_size(const antkv_layer& layer) { return num_queries_per_kv(layer) * (layer.head_size + 2); }

    static void split(const Sequence&, antkv_rows query, antkv_rows key, antkv_rows value, int index, float* partial);
    static void merge(const Sequence&, antkv_rows output, float* lse, const float* partials);
};

}  // namespace antkv
