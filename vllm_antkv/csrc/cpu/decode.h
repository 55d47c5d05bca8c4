#pragma once

#include "pages.h"

namespace antkv {

constexpr int kSplit = 2048;  // tokens of a split, whatever the batch: results do not depend on who else is served

// Attention of queries that lie side by side, the last of which is the last token of a sequence. Splits are independent of
// each other; `merge` comes after all of them.
struct Decode {
    // The query behind the last one that may be computed with `first`: all begin at the same token of the same splits.
    static int end_of_run(const Sequence& sequence, int first) {
        const int most = std::max(kMostRows / num_queries_per_kv(sequence.layer), 1);
        const int end = std::min({sequence.end, first + most, (first / kSplit + 1) * kSplit});
        // A window moves from block to block.
        const int moves = (sequence.first_visible(first) / kBlockSize + 1) * kBlockSize + sequence.layer.window - 1;
        return sequence.first_visible(end - 1) / kBlockSize == sequence.first_visible(first) / kBlockSize ? end : moves;
    }
    // Splits are counted from the start of the sequence; those before the query's window are left out.
    static int first_split(const Sequence& sequence) { return sequence.first_visible(sequence.end - 1) / kSplit; }
    static int end_split(const Sequence& sequence) { return (sequence.end + kSplit - 1) / kSplit; }
    // Floats of a partial result: (num_rows, head_size) output, (num_rows) maximum, (num_rows) sum. Rows are query heads, those
    // of a query side by side.
    static int partial_size(const antkv_layer& layer, int num_rows) { return num_rows * (layer.head_size + 2); }

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

    // Floats that `split` works in: logits, weights in another order of up to kWeightRows heads, and queries in two orders.
    static constexpr int kWeightRows = 16;
    static int scratch_size(const antkv_layer& layer, int num_rows) {
        return (num_rows + kWeightRows) * kSplit + 2 * num_rows * layer.head_size;
    }
    static void split(const Sequence&, int first_query, const antkv_work&, int index, float* scratch, float* partial);
    // Of the last query alone, whose heads begin with `first_row`; partials: of all splits that it sees.
    static void merge(const Sequence&, antkv_rows output, const float* partials, int num_rows, int first_row);

  private:
    static constexpr int kMostRows = 32;  // whose logits stay in the second-level cache
};

}  // namespace antkv
