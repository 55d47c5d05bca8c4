#pragma once

#include "memory.h"
#include "pages.h"

namespace antkv {

// Whether the request's new tokens go through `Decode`: a token behind the prompt, and drafts behind it. A prompt's do not:
// what is computed for them would depend on how the prompt is cut.
inline bool is_decode(const antkv_layer& layer, const antkv_step& step, int request, const uint8_t* is_prefilling) {
    const int count = step.query_start_loc[request + 1] - step.query_start_loc[request];
    return count <= layer.score_slots && !(is_prefilling && is_prefilling[request]);
}

// Attention of runs of queries: FlashAttention over tiles of keys, decoded once for all queries and heads of the run.
//
// A query's result does not depend on the queries beside it, nor on where its run begins: tiles are those of its VQ block.
class Prefill {
  public:
    // Queries per run. A run lies in one VQ block, since its queries see the anchors of the blocks before their own.
    static int run_length(const antkv_layer& layer) {
        return std::clamp(kMaxRows / num_queries_per_kv(layer), 1, kBlockSize);
    }

    explicit Prefill(const antkv_layer& layer);

    // Queries at positions begin .. end, which are in hand.
    void run(const Sequence&, int begin, int end, const antkv_work&);

  private:
    static constexpr int kMaxRows = 256;

    void coded_tiles(const Sequence&, int begin, int end);
    void exact_tiles(const Sequence&, int begin, int end, antkv_rows key, antkv_rows value);
    // Softmax over one more tile of `count` keys; `visible(query, column)` says who sees what, unless all do. anchors: of
    // coded keys, the columns of those that are more than codes; null where no key is coded.
    template <typename Visible>
    void add_tile(int begin, int count, bool all_visible, const Vector<int>* anchors, Visible visible);

    const antkv_layer& layer_;
    const int group_, size_, max_rows_;
    int rows_ = 0;  // of the run: query by query, heads side by side
    Buffer queries_, outputs_, logits_, keys_, columns_, values_, max_, total_, bias_;
};

}  // namespace antkv
