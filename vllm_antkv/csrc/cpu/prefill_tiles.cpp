// Attention of runs of queries of a bfloat16 model by tiles: FlashAttention over tokens that are decoded once for all
// queries and heads of the run.
//
// Everything is transposed: tokens stand in rows and queries in columns, so that a query's softmax stays in a lane. A
// query's result depends neither on the queries beside it nor on where its run begins: tokens are added up in the same
// order, 32 by 32, and what weights are relative to is a power of two, by which scaling is exact.
#include "operations.h"

#include <cmath>

#include "logit_rules.h"
#include "prefill.h"
#include "softmax_tiles.h"
#include "tiles/tiles.h"

namespace antkv {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

template <typename Tiles>
class TilePrefill {
  public:
    // Queries per run: what a run decodes serves all of them.
    static int run_length(const antkv_layer& layer) {
        return std::clamp(kMaxRows / num_queries_per_kv(layer), 1, 4 * kBlockSize);
    }

    explicit TilePrefill(const antkv_layer& layer)
        : layer_(layer), group_(num_queries_per_kv(layer)), size_(layer.head_size), padded_(padded_head_size(layer)),
          strip_floats_(kStrip * padded_ + kStrip * padded_ / 2 + 4 * kStrip),
          strips_(floats(rounded_up(run_length(layer) * group_, kStrip) / kStrip * strip_floats_)),
          weights_(floats(TokenTiles::kMax * kTokens * kStrip / 2)), tokens_(layer) {}

    // Queries at positions begin .. end, which are in hand.
    void run(const Sequence& sequence, int begin, int end, const antkv_work& work) {
        begin_ = begin, end_ = end;
        load_queries(sequence, work.query);
        const int num_strips = num_strips_of(end);
        // Rows in full precision have channels in the model's order, as queries still do. They are the same for the queries
        // of a block, or for all of a step.
        const int origin = begin / kBlockSize * kBlockSize, span = layer_.prefill_reads_cache ? kBlockSize : end - origin;
        for (int first = origin; first < end; first += span) {
            const int begin_strip = std::max(first - begin, 0) * group_ / kStrip;
            const int end_strip = num_strips_of(std::min(first + span, end));
            tokens_.exact(sequence, first, first + span, begin, end, work.key, work.value,
                          [&](int count) { add_tokens<false>(begin_strip, end_strip, count); });
        }
        for (int index = 0; layer_.k_order && index < num_strips; ++index)
            for (int half = 0; half < kStrip; half += kTileRows)
                order_column_tiles(layer_, strip(index).queries + half * padded_);
        tokens_.coded(sequence, begin, end, [&](int count) { add_tokens<true>(0, num_strips, count); });
        store_outputs(sequence, work.output);
    }

  private:
    static constexpr int kMaxRows = 2048;

    // Strips of the queries from `begin_` to `end`.
    int num_strips_of(int end) const { return rounded_up((end - begin_) * group_, kStrip) / kStrip; }
    // Row of a strip; the last one fills what is left of it.
    int row_at(int index, int lane) const { return std::min(index * kStrip + lane, (end_ - begin_) * group_ - 1); }
    int token_of(const Sequence& sequence, int row) const { return sequence.first + begin_ + row / group_ - sequence.start; }
    int head_of(const Sequence& sequence, int row) const { return sequence.head * group_ + row % group_; }

    Strip strip(int index) const {
        float* at = &strips_[index * strip_floats_];
        Strip strip;
        strip.outputs = at;
        strip.queries = (BFloat*)(at += kStrip * padded_);
        strip.max = at += kStrip * padded_ / 2;
        strip.total = at += kStrip;
        strip.bias = at += kStrip;
        strip.positions = (int32_t*)(at + kStrip);
        strip.first = strip.positions[0], strip.last = strip.positions[kStrip - 1];
        return strip;
    }

    // Rows are query by query, heads side by side.
    void load_queries(const Sequence& sequence, antkv_rows query) const {
        for (int index = 0; index < num_strips_of(end_); ++index) {
            const Strip to = strip(index);
            std::fill_n(to.outputs, kStrip * padded_, 0.0f);
            for (int lane = 0; lane < kStrip; ++lane) {
                const float sink = layer_.sinks ? layer_.sinks[head_of(sequence, row_at(index, lane))] * kLog2E : -kInfinity;
                to.max[lane] = std::ceil(sink);
                to.total[lane] = layer_.sinks ? std::exp2(sink - to.max[lane]) : 0;
                to.positions[lane] = begin_ + row_at(index, lane) / group_;
                to.bias[lane] = bias_of(sequence, query, row_at(index, lane));
            }
            for (int half = 0; half < kStrip; half += kTileRows) {
                const auto row = [&](int lane) {
                    const int at = row_at(index, half + lane);
                    return (const BFloat*)row_of(layer_, query, token_of(sequence, at), head_of(sequence, at));
                };
                load_column_tiles(layer_, row, to.queries + half * padded_);
            }
        }
    }

    // `Softmax` shifts exponents by whole units; without a cap this is as many of them.
    float bias_of(const Sequence& sequence, antkv_rows query, int row) const {
        if (!layer_.jensen_weights) return 0;
        alignas(64) float channels[kMaxHeadSize];
        const int head = head_of(sequence, row);
        widen(layer_, row_of(layer_, query, token_of(sequence, row), head), size_, channels);
        const float bias = jensen_bias(layer_, head, channels), factor = softmax_scale(layer_) * kLog2E * Powers::kUnit;
        return layer_.soft_cap ? bias : std::nearbyint(bias * factor) / factor;
    }

    void store_outputs(const Sequence& sequence, antkv_rows output) const {
        const int num_rows = (end_ - begin_) * group_;
        for (int first = 0; first < num_rows; first += kTileRows) {
            const Strip from = strip(first / kStrip);
            const int half = first % kStrip, count = std::min(kTileRows, num_rows - first);
            BFloat* to[kTileRows];
            for (int i = 0; i < count; ++i) {
                const int token = token_of(sequence, first + i), head = head_of(sequence, first + i);
                to[i] = (BFloat*)row_of(layer_, output, token, head);
            }
            const Lanes factor = 1.0f / load_lanes(from.total + half);
            // Never -0, which would depend on whether tokens that the query does not see were added.
            const auto channel = [&](int c) { return load_lanes(from.outputs + c * kStrip + half) * factor + 0.0f; };
            for (int c = 0; c < size_; c += kTileDepth) {
                Lanes pairs[kLanes];
                for (int i = 0; i < kLanes; ++i) pairs[i] = (Lanes)to_pairs(channel(c + 2 * i), channel(c + 2 * i + 1));
                transpose(pairs);
                for (int i = 0; i < count; ++i) store_channels(to[i], c, size_, (BitLanes)pairs[i]);
            }
        }
    }

    // Adds what strips begin .. end see of the first `count` times 32 tokens in tiles, which are coded or exact.
    template <bool kCoded>
    void add_tokens(int begin, int end, int count) {
        int seen[TokenTiles::kMax];
        for (int index = begin; index < end; ++index) {
            const Strip to = strip(index);
            int num_seen = 0;
            for (int i = 0; i < count; ++i)
                if (!tokens_.seen(i).by_none(to.first, to.last)) seen[num_seen++] = i;
            if (num_seen) add_seen<kCoded>(to, seen, num_seen);
        }
    }

    template <bool kCoded>
    void add_seen(const Strip& strip, const int* seen, int count) {
        // Of 32 tokens each: those that become weights, those behind them, and those whose products are under way meanwhile.
        alignas(64) float buffers[3][kTokens * kStrip];
        const Operand queries = {strip.queries, kTileElements, (int64_t)kTileRows * padded_};
        const auto multiply = [&](int i, auto meanwhile) {
            Tiles::template product<false>(tokens_.keys(seen[i]), queries, padded_ / kTileDepth, buffers[i % 3], kStrip,
                                           meanwhile);
        };
        multiply(0, [] {});
        if (count > 1) multiply(1, [] {});
        alignas(64) static constexpr float kNothing[kStrip] = {};
        const bool has_bias = kCoded && layer_.jensen_weights;
        Softmax softmax(strip, softmax_scale(layer_) * kLog2E, has_bias && !layer_.soft_cap ? strip.bias : kNothing);
        constexpr int kPairs = kTokens / 2;
        const int pairs_meanwhile = (kPairs * kTileDepth + padded_ - 1) / padded_;
        int added = 0;
        for (int i = 0; i < count; ++i) {
            const float* logits = buffers[i % 3];
            if (has_bias) add_bias(strip, tokens_.seen(seen[i]).anchors, buffers[i % 3]);
            cap_logits(layer_, layer_.scale, 0, buffers[i % 3], kTokens * kStrip);
            if (!tokens_.seen(seen[i]).by_all(strip.first, strip.last)) hide(strip, tokens_.seen(seen[i]), buffers[i % 3]);
            if (__builtin_expect(softmax.outgrown(logits), 0)) {
                add_values(strip, seen, added, i);
                added = i;
                softmax.rescale(strip, padded_);
            }
            BFloat* to = (BFloat*)weights_.get() + i * kTileElements;
            int pair = 0;
            const auto weigh = [&](int end) {
                end = std::min(end, kPairs);
                softmax.weigh(powers_, logits + 2 * pair * kStrip, end - pair, to + 2 * pair * kLanes);
                pair = end;
            };
            if (i + 2 < count) multiply(i + 2, [&] { weigh(pair + pairs_meanwhile); });
            weigh(kPairs);
        }
        softmax.store(strip);
        add_values(strip, seen, added, count);
    }

    // To products of codes where a cap comes next; else all exponents are shifted, and anchors' products lowered here.
    void add_bias(const Strip& strip, uint32_t anchors, float* products) const {
        const float sign = layer_.soft_cap ? 1 : -1;
        for (uint32_t left = layer_.soft_cap ? ~anchors : anchors; left; left &= left - 1) {
            float* at = products + __builtin_ctz(left) * kStrip;
            for (int lane = 0; lane < kStrip; lane += kLanes)
                store_lanes(at + lane, load_lanes(at + lane) + load_lanes(strip.bias + lane) * sign);
        }
    }

    // Adds the values of tokens seen[begin] .. seen[end] times their weights.
    void add_values(const Strip& strip, const int* seen, int begin, int end) const {
        for (int next; begin < end; begin = next) {
            for (next = begin + 1; next < end && seen[next] == seen[next - 1] + 1;) ++next;
            const Operand weights = {(const BFloat*)weights_.get() + begin * kTileElements, kTileElements,
                                     TokenTiles::kMax * kTileElements};
            for (int c = 0; c < padded_; c += kStrip)
                Tiles::template product<true>(tokens_.values(seen[begin], c), weights, next - begin,
                                              strip.outputs + c * kStrip, kStrip, [] {});
        }
    }

    const antkv_layer& layer_;
    const Powers powers_;
    const int group_, size_, padded_;
    const int64_t strip_floats_;
    int begin_ = 0, end_ = 0;
    Buffer strips_, weights_;
    TokenTiles tokens_;
};

struct Task {
    int request, head, begin;
};

// The longest first.
Vector<Task> tasks_of(const antkv_layer& layer, const antkv_step& step, const uint8_t* is_prefilling, int length) {
    Vector<Task> tasks;
    for (int request = 0; request < step.num_reqs; ++request) {
        if (is_decode(layer, step, request, is_prefilling)) continue;
        for (int head = 0; head < layer.num_kv_heads; ++head) {
            const Sequence sequence(layer, step, request, head);
            for (int end = sequence.end, begin; end > sequence.start; end = begin) {
                begin = std::max((end - 1) / length * length, sequence.start);
                tasks.push_back({request, head, begin});
            }
        }
    }
    return tasks;
}

}  // namespace

bool prefill_in_tiles(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    return layer.dtype == ANTKV_BFLOAT16 && with_tiles(layer, [&](auto tiles) {
        using Tiles = decltype(tiles);
        const int length = TilePrefill<Tiles>::run_length(layer);
        const Vector<Task> tasks = tasks_of(layer, step, work.is_prefilling, length);
        if (tasks.empty()) return;
#pragma omp parallel
        {
            [[maybe_unused]] const typename Tiles::Scope scope;
            TilePrefill<Tiles> prefill(layer);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < tasks.size(); ++i) {
                const Sequence sequence(layer, step, tasks[i].request, tasks[i].head);
                const int begin = tasks[i].begin, end = std::min(begin / length * length + length, sequence.end);
                prefill.run(sequence, begin, end, work);
            }
        }
    });
}

}  // namespace antkv
