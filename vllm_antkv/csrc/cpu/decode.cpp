// Attention of single queries to the cache: split-KV, all query heads of a KV head together, merged by log-sum-exp.
// Drafts behind a query are computed with it: most of the work is reading the codes.
#include "decode.h"

#include <cmath>
#include <utility>

#include "bins.h"
#include "fixed_logits.h"
#include "logit_rules.h"
#include "memory.h"
#include "row_tiles.h"
#include "tile_logits.h"
#include "tile_values.h"

namespace antkv {
namespace {

constexpr int kTile = 32;     // rows decoded at a time: they stay in L1
constexpr int kByHistogram = 256;  // tokens from which adding up weights per code is faster than decoding

// What one query of a split sees: which tokens in full precision, which through their codes, whose logits are known when
// `attend` is called, and whose values come after it.
class Query {
  public:
    // Tokens begin .. end, from the first of a VQ block on. query: of its heads, (group, head_size); logits: (group, kSplit).
    Query(const Sequence& sequence, const antkv_work& work, int begin, int end, const float* query, float* logits,
          float* weights)
        : sequence_(sequence), layer_(sequence.layer), query_(work.query), group_(num_queries_per_kv(sequence.layer)),
          size_(sequence.layer.head_size), begin_(begin), count_(std::min(end, sequence.end) - begin),
          hidden_(std::max(sequence.first_visible(sequence.end - 1) - begin, 0)),
          own_block_((sequence.end - 1) / kBlockSize), queries_(query), logits_(logits), weights_(weights) {
        sequence.seen_through_codes(sequence.end - 1, begin, count_, coded_);
        // Their rows in full precision may be gone.
        std::fill_n(coded_, hidden_, true);
        for (const bool* at = coded_; (at = (const bool*)std::memchr(at, 0, coded_ + count_ - at)); ++at)
            exact_[num_exact_++] = at - coded_;
        find_exact(work.key, work.value);
        for (int h = 0; h < group_; ++h) bias_[h] = jensen_bias(layer_, sequence_.head * group_ + h, query + h * size_);
    }

    // Turns logits into weights, 0 up to `padded` tokens for those that are not seen through codes. Writes the unnormalised
    // output (group, head_size) but for them, and the maximum and the sum (group) it is relative to.
    void attend(float* output, float* max, float* total, int padded) {
        anchor_logits(queries_);
        if (num_exact_) exact_logits(queries_);
        softmax(max, total);
        for (int h = 0; h < group_; ++h) {
            float* row = logits_ + h * kSplit;
            std::fill(row + std::min(rounded_up(count_, kTile), padded), row + padded, 0.0f);
        }
        std::fill_n(output, group_ * size_, 0.0f);
        if (num_exact_) exact_values(output);
        anchor_values(output);
    }

    int count() const { return count_; }
    // Tokens that it sees through their codes; a later query sees no fewer of them so.
    const bool* coded() const { return coded_; }
    bool by_histogram() const { return layer_.num_centroids == 256 && count_ - num_exact_ >= kByHistogram; }

  private:
    VQPage page_of(int first) const { return sequence_.vq_page((begin_ + first) / kBlockSize); }
    // Calls use(rows, tokens, count) for the anchors that the query sees and that are kept as they are, or for the
    // corrections of the others, at most kTile at a time.
    template <typename Use>
    void for_anchors(bool of_values, bool exact, Use use) {
        alignas(64) float rows[kTile * kMaxHeadSize];
        int tokens[kTile], count = 0;
        for (int first = 0; first < count_ && (begin_ + first) / kBlockSize < own_block_; first += kBlockSize) {
            const VQPage page = page_of(first);
            for (int anchor = 0; anchor < layer_.anchor_rows; ++anchor) {
                const int offset = page.anchor_offsets(of_values)[anchor] - (exact ? kExactAnchor : 0);
                if (offset < 0 || offset >= kExactAnchor || !coded_[first + offset]) continue;
                float* row = rows + count * size_;
                if (exact)
                    widen(layer_, page.anchor(of_values, anchor), size_, row);
                else
                    widen<E4M3>(page.anchor(of_values, anchor), size_, row);
                tokens[count++] = first + offset;
                if (count == kTile) use(rows, tokens, std::exchange(count, 0));
            }
        }
        if (count) use(rows, tokens, count);
    }

    // Where rows in full precision are. They are read last, and asked for here.
    void find_exact(antkv_rows key, antkv_rows value) {
        // Tiles take rows in multiples of kKeys. Zeros, as a weight of 0 times what is not a number is none either.
        alignas(64) static constexpr BFloat kNothing[kMaxHeadSize] = {};
        const int bytes = size_ * element_size(layer_), padded = (num_exact_ + kKeys - 1) / kKeys * kKeys;
        for (int i = 0; i < num_exact_; ++i) {
            const auto rows = sequence_.exact_rows(key, value, begin_ + exact_[i]);
            exact_keys_[i] = (const BFloat*)rows.key;
            exact_values_[i] = (const BFloat*)rows.value;
            for (int at = 0; at < bytes; at += 64) {
                __builtin_prefetch(rows.key + at);
                __builtin_prefetch(rows.value + at);
            }
        }
        std::fill(exact_keys_ + num_exact_, exact_keys_ + padded, kNothing);
        std::fill(exact_values_ + num_exact_, exact_values_ + padded, kNothing);
    }

    // What anchors add to the logits of their codes, or have instead of them.
    void anchor_logits(const float* queries) {
        for_anchors(false, false, [&](const float* rows, const int* tokens, int count) {
            for_products(queries, rows, tokens, count, [](float logit, float product) { return logit + product; });
        });
        for_anchors(false, true, [&](const float* rows, const int* tokens, int count) {
            for_products(queries, rows, tokens, count, [](float, float product) { return product; });
        });
    }
    void exact_logits(const float* queries) {
        if (exact_rows_in_tiles()) return exact_logits_in_tiles();
        alignas(64) float rows[kTile * kMaxHeadSize];
        for (int first = 0; first < num_exact_; first += kTile) {
            const int count = std::min(kTile, num_exact_ - first);
            widen_exact(false, first, count, rows);
            for_products(queries, rows, exact_ + first, count, [](float, float product) { return product; });
        }
    }
    // Whether rows in full precision are multiplied as they are: half as many products as in float32 or fewer, and no
    // conversions.
    bool exact_rows_in_tiles() const {
        return layer_.tiles && layer_.dtype == ANTKV_BFLOAT16 && size_ % kTileDepth == 0;
    }
    void exact_logits_in_tiles() {
        const auto* queries = (const BFloat*)row_of(layer_, query_, sequence_.last_row(), sequence_.head * group_);
        with_tiles(layer_, [&](auto tiles) {
            const auto put = [&](int h, int first, Lanes products) {
                float* to = logits_ + h * kSplit;
                products = products - bias_[h];
                if (are_neighbours(first)) return store_lanes(to + exact_[first], products);
                for (int t = first; t < std::min(first + kLanes, num_exact_); ++t) to[exact_[t]] = products[t - first];
            };
            decltype(tiles)::dot_rows(group_, queries, exact_keys_, size_, num_exact_, put);
        });
    }
    // Whether kLanes tokens from one of `exact_` on stand side by side.
    bool are_neighbours(int first) const {
        const int last = first + kLanes - 1;
        return last < num_exact_ && exact_[last] - exact_[first] == last - first;
    }
    void exact_values_in_tiles(float* output) {
        const int padded = (num_exact_ + kKeys - 1) / kKeys * kKeys;
        with_tiles(layer_, [&](auto tiles) {
            for_tile_heads<8>(group_, [&](auto heads, int h, int num_heads) {
                using Values = typename decltype(tiles)::template Values<heads>;
                Values sums;
                alignas(64) BFloat packed[Values::kWeightElements];
                for (int i = 0; i < num_heads; ++i) take_exact(logits_ + (h + i) * kSplit, padded, weights_ + i * kSplit);
                for (int c = 0; c < size_; c += kValues) {
                    const int num_channels = std::min(kValues, size_ - c);
                    sums.clear();
                    for (int first = 0; first < padded; first += kKeys) {
                        Values::pack(weights_ + first, kSplit, num_heads, packed);
                        const auto row = [&](int t, int half) {
                            return load_pairs(exact_values_[first + t] + c + half * kTileDepth);
                        };
                        sums.add_rows(row, num_channels / kTileDepth, packed);
                    }
                    sums.add_to(output + h * size_ + c, size_, num_heads, num_channels);
                }
            });
        });
    }
    // A head's weights of rows in full precision, which its codes then do not have.
    void take_exact(float* from, int padded, float* to) const {
        for (int first = 0; first < padded; first += kLanes) {
            if (are_neighbours(first)) {
                store_lanes(to + first, load_lanes(from + exact_[first]));
                store_lanes(from + exact_[first], Lanes{});
                continue;
            }
            for (int t = first; t < first + kLanes; ++t) to[t] = t < num_exact_ ? std::exchange(from[exact_[t]], 0.0f) : 0;
        }
    }
    void widen_exact(bool of_values, int first, int count, float* rows) const {
        const auto* from = (of_values ? exact_values_ : exact_keys_) + first;
        for (int i = 0; i < count; ++i) widen(layer_, from[i], size_, rows + i * size_);
    }
    // Sets logits to use(logit, product with the row) less the bias, for all heads and tokens: none of these rows is a
    // mere code, and the bias is added to all logits of a query.
    template <typename Use>
    void for_products(const float* queries, const float* rows, const int* tokens, int count, Use use) {
        alignas(64) float products[kMaxGroup * kTile];
        dot_rows(group_, queries, rows, size_, count, products, kTile);
        for (int h = 0; h < group_; ++h)
            for (int i = 0; i < count; ++i) {
                float& logit = logits_[h * kSplit + tokens[i]];
                logit = use(logit, products[h * kTile + i]) - bias_[h];
            }
    }

    // Turn logits into weights.
    void softmax(float* max, float* total) {
        const Vec scale = broadcast(softmax_scale(layer_));
        for (int h = 0; h < group_; ++h) {
            float* row = logits_ + h * kSplit;
            cap_logits(layer_, layer_.scale, bias_[h], row, (count_ + W - 1) / W * W);
            std::fill_n(row, hidden_, -kInfinity);
            std::fill(row + count_, row + (count_ + kTile - 1) / kTile * kTile, -kInfinity);
            Vec top = broadcast(-kInfinity);
            for (int t = 0; t < count_; t += W) top = maximum(top, load(row + t) * scale);
            const Vec offset = broadcast(largest(top));
            max[h] = largest(top) + (layer_.soft_cap ? 0 : bias_[h] * layer_.scale);
            Vec totals = {};
            for (int t = 0; t < (count_ + kTile - 1) / kTile * kTile; t += W) {
                const Vec weight = exponential(load(row + t) * scale - offset);
                totals += weight;
                store(row + t, weight);
            }
            total[h] = sum(totals);
        }
    }

    // Adds the values that are there in full precision; the weights of their codes become 0.
    void exact_values(float* output) {
        if (exact_rows_in_tiles()) return exact_values_in_tiles(output);
        alignas(64) float rows[kTile * kMaxHeadSize];
        for (int first = 0; first < num_exact_; first += kTile) {
            const int count = std::min(kTile, num_exact_ - first);
            widen_exact(true, first, count, rows);
            add_instead_of_codes(rows, exact_ + first, count, output);
        }
    }
    // What anchors add to the values of their codes, or have instead of them.
    void anchor_values(float* output) {
        for_anchors(true, false, [&](const float* rows, const int* tokens, int count) {
            add_values(rows, tokens, count, output);
        });
        for_anchors(true, true, [&](const float* rows, const int* tokens, int count) {
            add_instead_of_codes(rows, tokens, count, output);
        });
    }
    void add_instead_of_codes(const float* rows, const int* tokens, int count, float* output) {
        add_values(rows, tokens, count, output);
        for (int h = 0; h < group_; ++h)
            for (int i = 0; i < count; ++i) logits_[h * kSplit + tokens[i]] = 0;
    }
    void add_values(const float* rows, const int* tokens, int count, float* output) {
        float weights[kMaxGroup * kTile];
        for (int h = 0; h < group_; ++h)
            for (int i = 0; i < count; ++i) weights[h * kTile + i] = logits_[h * kSplit + tokens[i]];
        add_rows(group_, weights, kTile, rows, size_, count, output);
    }

    const Sequence sequence_;
    const antkv_layer& layer_;
    antkv_rows query_;
    const int group_, size_, begin_, count_, hidden_, own_block_;
    const float* queries_;
    float *logits_, *weights_;  // weights after `softmax`; and room for weights in another order
    float bias_[kMaxGroup];  // see `jensen_bias`
    // Tokens of the split: whether the query sees them through their codes, and those it does not.
    bool coded_[kSplit];
    int exact_[kSplit], num_exact_ = 0;
    // Rows in full precision, in the dtype of the model.
    const BFloat *exact_keys_[kSplit], *exact_values_[kSplit];
};

// The codes of a split's tokens, for all heads of some queries that lie side by side: they are read once for all of them.
// What is computed for one does not depend on the others.
class Split {
  public:
    // Queries from the first one on up to the last of `sequence`; tokens from `begin` on, the first of a VQ block.
    Split(const Sequence& sequence, const antkv_work& work, int first_query, int begin, int end, float* scratch)
        : sequence_(sequence), layer_(sequence.layer), work_(work), group_(num_queries_per_kv(sequence.layer)),
          size_(sequence.layer.head_size), num_queries_(sequence.end - first_query), num_rows_(num_queries_ * group_),
          begin_(begin), end_(end), logits_(scratch), weights_(logits_ + num_rows_ * kSplit),
          queries_(weights_ + Decode::kWeightRows * kSplit), of_codes_(queries_ + num_rows_ * size_) {
        for (int i = 0; i < num_rows_; ++i) {
            const int token = sequence.last_row() - num_queries_ + 1 + i / group_, head = sequence.head * group_ + i % group_;
            widen(layer_, row_of(layer_, work.query, token, head), size_, queries_ + i * size_);
        }
        std::copy_n(queries_, num_rows_ * size_, of_codes_);
        for (int i = 0; i < num_rows_; ++i) to_code_order(layer_, of_codes_ + i * size_);
    }

    // See `Decode::partial_size`.
    void run(float* output) {
        Query last = query(num_queries_ - 1);
        coded_ = last.coded();
        count_ = last.count();
        const int position = sequence_.first_of_run(begin_, count_);
        if (position < 0 || !logits_in_16_bits(position))
            for (int first = 0; first < count_; first += kBlockSize) coded_logits(first);
        int num_decoded = 0;  // the first queries, for which rows are decoded where tiles are not for this layer
        const auto attend = [&](Query& query, int index) {
            float *max = output + num_rows_ * size_ + index * group_, *to = output + index * group_ * size_;
            query.attend(to, max, max + num_rows_, rounded_up(count_, kTile));
            num_decoded += !query.by_histogram();
        };
        for (int index = 0; index < num_queries_ - 1; ++index) {
            Query earlier = query(index);
            attend(earlier, index);
        }
        attend(last, num_queries_ - 1);
        if (values_in_tiles(output)) return;
        for (int first = 0; num_decoded && first < count_; first += kTile)
            decoded_values(first, num_decoded * group_, output);
        // One by one: the weights of a query per code just fit into the first-level cache.
        for (int index = num_decoded; index < num_queries_; ++index) values_by_histogram(index * group_, output);
    }

  private:
    bool any_coded(int first, int count) const { return std::memchr(coded_ + first, 1, count); }
    VQPage page_of(int first) const { return sequence_.vq_page((begin_ + first) / kBlockSize); }
    Query query(int index) {
        const int position = sequence_.end - num_queries_ + index;
        return {sequence_.until(position), work_, begin_, end_, queries_ + index * group_ * size_,
                logits_ + index * group_ * kSplit, weights_};
    }

    // Ask for what comes next while this block is computed: the hardware does not see across pages.
    void prefetch(int first) const {
        const int bytes = kBlockSize * layer_.code_bytes;
        const auto ask = [&](const uint8_t* from) {
            for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
        };
        ask(page_of(first).codes(true, 0));
        if (first + kBlockSize < count_) ask(page_of(first + kBlockSize).codes(false, 0));
        // Anchors of K, those of V and their offsets follow each other.
        const auto *anchors = page_of(first).anchor(false, 0), *end = (const uint8_t*)page_of(first).anchor_offsets(true);
        for (; anchors <= end; anchors += 64) __builtin_prefetch(anchors);
    }

    // Logits of all coded tokens, whose K rotates by `position` and one more each. False where float32 is
    // for this layer.
    bool logits_in_16_bits(int position) {
        if (fixed_logits_fit(layer_)) {
            for (int h = 0; h < num_rows_; h += 16) {
                const int num_heads = std::min(16, num_rows_ - h);
                if (num_heads <= 4) fixed_logits<1>(h, num_heads, position);
                else if (num_heads <= 8) fixed_logits<2>(h, num_heads, position);
                else fixed_logits<4>(h, num_heads, position);
            }
            return true;
        }
        return tile_logits_fit(layer_) && with_tiles(layer_, [&](auto tiles) {
            using Tiles = decltype(tiles);
            if constexpr (Tiles::kIsFast) {
                for_tile_heads<16>(num_rows_, [&](auto heads, int h, int num_heads) {
                    with_centroids(layer_, sequence_.head, layer_.k_centroids, [&](auto centroids) {
                        TileLogits<Tiles, heads>(layer_, of_codes_ + h * size_, num_heads)
                            .run(centroids, position, count_, codes_of(false), is_coded(), logits_ + h * kSplit, kSplit);
                    });
                });
            }
        });
    }
    template <int kSets>
    void fixed_logits(int h, int num_heads, int position) {
        const auto run = [&](auto head_size) {
            FixedLogits<kSets, head_size> fixed(layer_, sequence_.head, of_codes_ + h * size_, num_heads);
            with_centroids(layer_, sequence_.head, (const uint16_t*)layer_.k_fixed, [&](auto centroids) {
                fixed.run(centroids, position, count_, codes_of(false), is_coded(), logits_ + h * kSplit, kSplit);
            });
        };
        if (size_ == 128 && layer_.rotary_dim == 128 && layer_.is_neox_style) run(std::integral_constant<int, 128>{});
        else run(std::integral_constant<int, 0>{});
    }
    // Adds the coded values. False where float32 is for this layer.
    bool values_in_tiles(float* output) {
        return tile_values_fit(layer_) && with_tiles(layer_, [&](auto tiles) {
            for_tile_heads<8>(num_rows_, [&](auto heads, int h, int num_heads) {
                with_centroids(layer_, sequence_.head, layer_.v_bfloat16, [&](auto centroids) {
                    add_in_tiles<decltype(tiles), heads>(layer_, centroids, count_, codes_of(true), is_coded(),
                                                         logits_ + h * kSplit, kSplit, num_heads, output + h * size_);
                });
            });
        });
    }
    // Codes of the tokens from one on, a multiple of kKeys.
    auto codes_of(bool of_values) const {
        return [this, of_values](int first) {
            if (!of_values && first % kBlockSize == 0) prefetch(first);
            return page_of(first).codes(of_values, first % kBlockSize);
        };
    }
    // Whether any of kKeys tokens from one on is seen through its code.
    auto is_coded() const {
        return [this](int first) { return coded_[first] || any_coded(first, std::min(kKeys, count_ - first)); };
    }

    // Logits of the tokens of a block through their codes.
    void coded_logits(int first) {
        prefetch(first);
        alignas(64) float rotated[kMaxGroup * kMaxHeadSize], rows[kTile * kMaxHeadSize];
        const int end = std::min(first + kBlockSize, count_);
        for (int tile = first; tile < end; tile += kTile) {
            const int count = std::min(kTile, end - tile);
            if (!any_coded(tile, count)) continue;
            const int position = sequence_.first_of_run(begin_ + tile, count);
            if (position < 0) {
                rotated_keys(sequence_, begin_ + tile, count, rows);
                dot_rows(num_rows_, of_codes_, rows, size_, count, logits_ + tile, kSplit);
                continue;
            }
            std::copy_n(of_codes_, num_rows_ * size_, rotated);
            for (int h = 0; h < num_rows_; ++h) rotate_back(layer_, position, rotated + h * size_);
            dot_codes(layer_, sequence_.head, page_of(first).codes(false, tile - first), count, num_rows_, rotated,
                      logits_ + tile, kSplit, rows);
        }
    }
    void decoded_values(int first, int num_rows, float* output) {
        alignas(64) float rows[kTile * kMaxHeadSize];
        const int count = std::min(kTile, count_ - first);
        if (!any_coded(first, count)) return;
        decode_rows(layer_, sequence_.head, true, page_of(first).codes(true, first % kBlockSize), count, rows);
        add_rows(num_rows, logits_ + first, kSplit, rows, size_, count, output);
    }

    // Of the query whose heads are from row `h` on.
    void values_by_histogram(int h, float* output) {
        for (const int end = h + group_; h < end;) {
            const int left = end - h;
            if (left > 8) h += values_by_histogram<16>(h, left, output);
            else if (left > 4) h += values_by_histogram<8>(h, left, output);
            else if (left > 2) h += values_by_histogram<4>(h, left, output);
            else if (left > 1) h += values_by_histogram<2>(h, left, output);
            else h += values_by_histogram<1>(h, left, output);
        }
    }
    // For up to kLanes of the heads from `h` on; returns how many.
    template <int kLanes>
    int values_by_histogram(int h, int left, float* output) {
        static_assert(kLanes <= Decode::kWeightRows);
        const int heads = std::min(kLanes, left);
        for (int t = 0; t < count_; t += W) {
            Vec rows[kLanes] = {};
            for (int lane = 0; lane < heads; ++lane) rows[lane] = load(logits_ + (h + lane) * kSplit + t);
            interleave<kLanes>(rows);
            for (int i = 0; i < kLanes; ++i) store(weights_ + t * kLanes + i * W, rows[i]);
        }
        const auto codes = [&](int block) { return page_of(block * kBlockSize).codes(true, 0); };
        with_centroids(layer_, sequence_.head, layer_.v_centroids, [&](auto centroids) {
            if constexpr (!centroids.kIs12Bit)
                add_by_histogram<kLanes>(layer_, centroids, codes, count_, weights_, heads, output + h * size_);
        });
        return heads;
    }

    const Sequence& sequence_;
    const antkv_layer& layer_;
    const antkv_work& work_;
    const int group_, size_, num_queries_, num_rows_;  // rows: heads of all queries
    const int begin_, end_;
    float *logits_, *weights_;     // (num_rows, kSplit), weights after `Query::attend`; and room for weights in another order
    float *queries_, *of_codes_;  // (num_rows, head_size), in the orders of the model and of codes
    // Of the last query, which sees most tokens through codes.
    const bool* coded_;
    int count_;
};

}  // namespace

void Decode::read_tables(const antkv_layer& layer, int head) {
    const int64_t bytes = (int64_t)layer.num_centroids * layer.head_size * sizeof(uint16_t);
    const void* k_table = fixed_logits_fit(layer) ? (const void*)layer.k_fixed : layer.k_centroids;
    const void* v_table = tile_values_fit(layer) ? layer.v_bfloat16 : layer.v_centroids;
    for (const void* table : {k_table, v_table}) read_ahead((const uint8_t*)table + head * bytes, bytes);
}

void Decode::split(const Sequence& sequence, int first_query, const antkv_work& work, int index, float* scratch,
                   float* partial) {
    const int begin = std::max(index * kSplit, sequence.first_visible(first_query) / kBlockSize * kBlockSize);
    Split(sequence, work, first_query, begin, (index + 1) * kSplit, scratch).run(partial);
}

void Decode::merge(const Sequence& sequence, antkv_rows output, const float* partials, int num_rows, int first_row) {
    const antkv_layer& layer = sequence.layer;
    const int group = num_queries_per_kv(layer), size = layer.head_size;
    const int stride = partial_size(layer, num_rows), count = end_split(sequence) - first_split(sequence);
    for (int h = 0; h < group; ++h) {
        const int head = sequence.head * group + h, row = first_row + h;
        float max = layer.sinks ? layer.sinks[head] : -kInfinity;
        for (int i = 0; i < count; ++i) max = std::max(max, partials[i * stride + num_rows * size + row]);
        float total = layer.sinks ? std::exp(layer.sinks[head] - max) : 0;
        alignas(64) float result[kMaxHeadSize] = {};
        for (int i = 0; i < count; ++i) {
            const float* partial = partials + i * stride;
            const float weight = std::exp(partial[num_rows * size + row] - max);
            total += weight * partial[num_rows * size + num_rows + row];
            for (int c = 0; c < size; ++c) result[c] += weight * partial[row * size + c];
        }
        for (int c = 0; c < size; ++c) result[c] /= total;
        narrow(layer, result, size, row_of(layer, output, sequence.last_row(), head));
    }
}

}  // namespace antkv
