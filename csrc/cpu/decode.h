#pragma once

#include "pages.h"

namespace antkv {

constexpr int kMaxGroup = 64;  // query heads per KV head
constexpr int kSplit = 2048;   // tokens of a split, whatever the batch: results do not depend on who else is served

// Attention of a request's only new token. Splits are independent of each other; `merge` comes after all of them.
struct Decode {
    // Splits are counted from the start of the sequence; those before the query's window are left out.
    static int first_split(const Sequence& sequence) { return sequence.first_visible(sequence.end - 1) / kSplit; }
    static int end_split(const Sequence& sequence) { return (sequence.end + kSplit - 1) / kSplit; }
    // Floats of a partial result: (group, head_size) output, (group) maximum, (group) sum.
    static int partial_size(const antkv_layer& layer) { return num_queries_per_kv(layer) * (layer.head_size + 2); }

    static void split(const Sequence&, antkv_rows query, antkv_rows key, antkv_rows value, int index, float* partial);
    static void merge(const Sequence&, antkv_rows output, float* lse, const float* partials);
};

}  // namespace antkv
