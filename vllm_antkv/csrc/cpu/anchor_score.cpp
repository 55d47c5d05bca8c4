// Anchor Scores (AnTKV, equation 5) of the blocks that a step touches, and the anchors of those that close.
#include <atomic>
#include <cmath>
#include <cstring>

#include "gemm.h"
#include "logit_rules.h"
#include "memory.h"
#include "operations.h"
#include "codes.h"
#include "row_tiles.h"
#include "tiles/tiles.h"

namespace antkv {
namespace {

// VOTE_PRIOR of vllm_antkv/select/anchors.py, which says why.
constexpr float kVotePrior = 32;

// One (request, block, KV head).
class Block {
  public:
    Block(const Sequence& sequence, int block, const antkv_work& work)
        : sequence_(sequence), layer_(sequence.layer), query_(work.query), key_(work.key), value_(work.value),
          is_sink_(work.is_sink),
          size_(sequence.layer.head_size), group_(num_queries_per_kv(sequence.layer)), block_(block),
          first_(block * kBlockSize), begin_(std::max(first_, sequence.start)),
          end_(std::min(first_ + kBlockSize, sequence.end)), scale_(softmax_scale(sequence.layer)),
          keys_(floats(kBlockSize * size_)) {}

    // Returns the anchor rows chosen.
    int run() {
        load_scores();
        const bool closes = end_ - first_ == kBlockSize;
        const bool in_tiles = layer_.dtype == ANTKV_BFLOAT16 && with_tiles(layer_, [&](auto tiles) {
            votes_in_tiles<decltype(tiles)>();
        });
        // Tiles take keys as they lie.
        if (!in_tiles) exact_rows(key_, false);
        for (int position = begin_; !in_tiles && position < end_; ++position) vote(position);
        if (!closes) return 0;
        // Only votes need keys as the queries are; what follows compares them with decoded rows.
        const CodeOrder order(layer_);
        for (int offset = 0; offset < kBlockSize; ++offset) {
            if (in_tiles) order.widen(sequence_.exact_row(key_, false, first_ + offset), row(offset));
            else to_code_order(layer_, row(offset));
        }
        const int num_keys = choose(false);
        exact_rows(value_, true);
        return num_keys + choose(true);
    }

  private:
    void exact_rows(antkv_rows in_hand, bool of_values) {
        for (int position = first_; position < end_; ++position)
            widen(layer_, sequence_.exact_row(in_hand, of_values, position), size_, row(position - first_));
    }
    float* row(int offset) { return &keys_[(int64_t)offset * size_]; }

    void load_scores() {
        for (int kind = 0; kind < 2; ++kind) std::fill_n(scores_[kind], kBlockSize, 0.0f);
        for_pages(begin_, [](float* scores, float* in_page, int count) { std::copy_n(in_page, count, scores); });
    }
    // When all heads of the query at `position` have added their share.
    void settle(int position) {
        if (is_sink_ && is_sink_[token_of(position)])
            scores_[0][position - first_] = scores_[1][position - first_] = kInfinity;
        // The next step may continue behind any of the last queries. It begins the block anew behind a full one.
        if (position < sequence_.end - layer_.score_slots || position + 1 == first_ + kBlockSize) return;
        for_pages(position + 1, [](float* scores, float* in_page, int count) { std::copy_n(scores, count, in_page); });
    }
    // Calls copy(scores, scores in their page, count) for the block's tokens before `end`, page by page. A block that closes
    // in this step, whatever is rejected, has no pages.
    template <typename Copy>
    void for_pages(int end, Copy copy) {
        for (int position = first_, count; position < end; position += count) {
            count = std::min(layer_.recency_block_size, end - position);
            uint8_t* page = sequence_.recency_page(position);
            for (int kind = 0; page && kind < 2; ++kind)
                copy(scores_[kind] + position - first_, sequence_.recency_scores(page, position, end - 1, kind), count);
        }
    }

    // A query's: logits of the block's rows, which become weights, and what votes of these weights count.
    struct Vote {
        int position, head;
        int padded;  // rows that it may see, whole vectors of them
        float* logits;
        float norm;  // of the query
        float offset, factor;
    };

    // Votes of the queries at a position, for all heads of the group.
    void vote(int position) {
        alignas(64) float queries[kMaxGroup * kMaxHeadSize], logits[kMaxGroup * kBlockSize];
        for (int h = 0; h < group_; ++h) widen(layer_, query_row(position, h), size_, queries + h * size_);
        dot_rows(group_, queries, row(0), size_, num_keys(position), logits, kBlockSize);
        Vote votes[kMaxGroup];
        for (int h = 0; h < group_; ++h)
            votes[h] = {position, h, padded_keys(position), logits + h * kBlockSize, norm<Float32>(queries + h * size_)};
        add_votes(votes, group_);
    }
    // The same for all queries, whose logits are products of tiles, those of 16 at once.
    template <typename Tiles>
    void votes_in_tiles() {
        const int padded = padded_head_size(layer_), num_rows = (end_ - begin_) * group_;
        [[maybe_unused]] const typename Tiles::Scope scope;
        alignas(64) BFloat keys[kBlockSize * kMaxHeadSize], queries[kTileRows * kMaxHeadSize];
        alignas(64) float logits[kTileRows * kBlockSize];
        for (int t = 0; t < rounded_up(end_ - first_, 2 * kTileRows); t += kTileRows) {
            // Rows past the end repeat the last one: nobody uses their logits.
            const auto key = [&](int lane) {
                return (const BFloat*)sequence_.exact_row(key_, false, std::min(first_ + t + lane, end_ - 1));
            };
            load_column_tiles(layer_, key, keys + t * padded);
        }
        for (int first = 0, position = begin_, head = 0; first < num_rows; first += kTileRows) {
            const int count = std::min(kTileRows, num_rows - first);
            const BFloat* rows[kTileRows];
            Vote votes[kTileRows];
            for (int i = 0; i < count; ++i, ++head) {
                if (head == group_) head = 0, ++position;
                rows[i] = (const BFloat*)query_row(position, head);
                votes[i] = {position, head, padded_keys(position), logits + i * kBlockSize, norm<BFloat16>(rows[i])};
            }
            load_row_tiles(layer_, count, [&](int i) { return rows[i]; }, queries);
            const int seen = num_keys(position);
            for (int t = 0; t < seen; t += 2 * kLanes)
                Tiles::few_rows({queries, kTileElements, 0}, {keys + t * padded, kTileElements, kTileRows * padded}, count,
                                padded / kTileDepth, logits + t, kBlockSize);
            add_votes(votes, count);
        }
    }

    int num_keys(int position) const { return position + 1 - first_; }
    const uint8_t* query_row(int position, int head) const {
        return row_of(layer_, query_, token_of(position), sequence_.head * group_ + head);
    }
    int token_of(int position) const { return sequence_.first + position - sequence_.start; }

    template <typename Element>
    float norm(const typename Element::Storage* query) const {
        Vec squares = {};
        for (int c = 0; c < size_; c += W) {
            const Vec channels = Element::load(query + c);
            squares += channels * channels;
        }
        return std::sqrt(sum(squares));
    }

    // AnS(K_j) += A_ij (1 - A_ij) |Q_i|, AnS(V_j) += A_ij for a query. Votes are added one query after the other,
    // so that sums do not depend on which of them come in one step. What comes before that is done for all of them at a
    // time, as one's has to wait for itself. Overwrites the logits.
    void add_votes(Vote* votes, int count) {
        for (Vote* vote = votes; vote < votes + count; ++vote) {
            hide(*vote);
            vote->offset = top(*vote);
        }
        for (Vote* vote = votes; vote < votes + count; ++vote) {
            float total = weigh(vote->logits, vote->padded, vote->offset);
            if (layer_.sinks) total += std::exp(sink(vote->head) - vote->offset);
            vote->factor = 1 / total;
        }
        for (const Vote* vote = votes; vote < votes + count; ++vote) {
            for (int t = 0; t < vote->padded; t += W) {
                const Vec weight = load(vote->logits + t) * vote->factor;
                // Rounding may bring a share above 1.
                const Vec share = weight > 1.0f ? broadcast(1) : weight;
                store(&scores_[0][t], load(&scores_[0][t]) + share * (1 - share) * vote->norm);
                store(&scores_[1][t], load(&scores_[1][t]) + share);
            }
            if (vote->head == group_ - 1) settle(vote->position);
        }
    }
    int padded_keys(int position) const { return (num_keys(position) + W - 1) / W * W; }
    int query_head(int head) const { return sequence_.head * group_ + head; }
    float sink(int head) const { return layer_.sinks ? layer_.sinks[query_head(head)] : -kInfinity; }

    // Logits of rows that the query does not see become those of no weight.
    void hide(const Vote& vote) const {
        const int count = num_keys(vote.position), padded = vote.padded;
        const int hidden = std::min(std::max(sequence_.first_visible(vote.position) - first_, 0), count);
        cap_logits(layer_, layer_.scale, 0, vote.logits, padded);
        std::fill_n(vote.logits, hidden, -kInfinity);
        float* last = vote.logits + padded - W;
        store(last, lane_numbers() < count - (padded - W) ? load(last) : broadcast(-kInfinity));
    }
    // The largest logit, with the sink.
    float top(const Vote& vote) const {
        Vec top = broadcast(sink(vote.head));
        for (int t = 0; t < vote.padded; t += W) top = maximum(top, load(vote.logits + t) * scale_);
        return largest(top);
    }
    static IntVec lane_numbers() {
        IntVec numbers;
        for (int i = 0; i < W; ++i) numbers[i] = i;
        return numbers;
    }
    // Logits to weights relative to `offset`; returns their sum.
    float weigh(float* logits, int padded, float offset) const {
        Vec totals = {};
        for (int t = 0; t < padded; t += W) {
            const Vec weight = exponential(load(logits + t) * scale_ - offset);
            totals += weight;
            store(logits + t, weight);
        }
        return sum(totals);
    }

    // Keep what the codes of the rows that matter most lose, and sinks as they are (all of them where anchors are);
    // `keys_` holds the block's exact rows of this kind. Returns how many.
    int choose(bool of_values) {
        const VQPage page = sequence_.vq_page(block_);
        float ranks[kBlockSize];
        rank(page, of_values, ranks);
        int16_t* offsets = page.anchor_offsets(of_values);
        std::fill_n(offsets, layer_.anchor_rows, (int16_t)-1);
        int chosen = 0;
        const int num_exact = exact_anchors(ranks);
        for (int anchor = 0; anchor < layer_.anchor_rows; ++anchor) {
            const int best = (int)(std::max_element(ranks, ranks + kBlockSize) - ranks);
            if (ranks[best] == -kInfinity) break;
            ranks[best] = -kInfinity;
            if (chosen < num_exact) {
                const void* exact = sequence_.exact_row(of_values ? value_ : key_, of_values, first_ + best);
                std::memcpy(page.anchor(of_values, anchor), exact, (size_t)size_ * element_size(layer_));
                offsets[anchor++] = (int16_t)(kExactAnchor + best);
                ++chosen;
                continue;
            }
            offsets[anchor] = (int16_t)best;
            float* error = row(best);
            if (!of_values) to_model_order(layer_, error);
            for (int c = 0; c < size_; c += W) E4M3::store(page.anchor(of_values, anchor) + c, load(error + c));
            ++chosen;
        }
        return chosen;
    }
    // Of how many anchors there is the row itself.
    int exact_anchors(const float* ranks) const {
        if (layer_.exact_anchors) return layer_.anchor_rows / 2;
        const int sinks = (int)std::count(ranks, ranks + kBlockSize, kInfinity);
        return std::min(sinks, layer_.anchor_rows - sinks);
    }
    // See `block_anchors` in vllm_antkv/select/anchors.py. Leaves the errors of the codes in `keys_`.
    void rank(VQPage page, bool of_values, float* ranks) {
        alignas(64) float coded[kTile * kMaxHeadSize];
        for (int first = 0; first < kBlockSize; first += kTile) {
            if (of_values)
                decode_rows(layer_, sequence_.head, true, page.codes(true, first), kTile, coded);
            else
                rotated_keys(sequence_, first_ + first, kTile, coded);
            for (int offset = first; offset < first + kTile; ++offset) {
                Vec squares = {};
                for (int c = 0; c < size_; c += W) {
                    const Vec error = load(row(offset) + c) - load(coded + (offset - first) * size_ + c);
                    squares += error * error;
                    store(row(offset) + c, error);
                }
                ranks[offset] = rank(offset, scores_[of_values][offset], std::sqrt(sum(squares)));
            }
        }
    }
    float rank(int offset, float score, float error) const {
        if (first_ + offset < layer_.prefix) return -kInfinity;
        if (score == kInfinity) return kInfinity;
        if (!layer_.has_anchors) return -kInfinity;
        return score * error / (std::min(kBlockSize - offset, layer_.window) + kVotePrior);
    }

    static constexpr int kTile = 32;

    const Sequence& sequence_;
    const antkv_layer& layer_;
    antkv_rows query_, key_, value_;
    const uint8_t* is_sink_;
    const int size_, group_, block_;
    const int first_, begin_, end_;  // of the block; new tokens begin_ .. end_
    const float scale_;
    Buffer keys_;
    alignas(64) float scores_[2][kBlockSize];
};

struct Task {
    int request, head, block;
};

}  // namespace

int64_t anchor_score(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    Vector<Task> tasks;
    for (int request = 0; request < step.num_reqs; ++request) {
        const Sequence sequence(layer, step, request, 0);
        if (sequence.start == sequence.end) continue;
        for (int head = 0; head < layer.num_kv_heads; ++head)
            for (int block = sequence.start / kBlockSize; block <= (sequence.end - 1) / kBlockSize; ++block)
                tasks.push_back({request, head, block});
    }
    int64_t chosen = 0;
#pragma omp parallel for schedule(dynamic) reduction(+ : chosen)
    for (size_t i = 0; i < tasks.size(); ++i) {
        const Sequence sequence(layer, step, tasks[i].request, tasks[i].head);
        chosen += Block(sequence, tasks[i].block, work).run();
    }
    return chosen;
}

}  // namespace antkv
