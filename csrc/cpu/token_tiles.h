// Tokens of the past as left factors of products by tiles, and which queries see them.
#pragma once

#include <utility>

#include "codes.h"
#include "memory.h"
#include "row_tiles.h"

namespace antkv {

// Tiles of keys and of transposed values, 32 tokens together, filled for a run of queries. What is together, and in which
// order, does not depend on where the run begins or ends.
class TokenTiles {
  public:
    static constexpr int kTokens = kTileDepth;     // together
    static constexpr int kMax = 1024 / kTokens;  // times 32 tokens: they stay in L2

    // Queries that see each of 32 tokens: those at positions from .. until, both included.
    struct Seen {
        int32_t from[kTokens], until[kTokens];
        int first_from, last_from, first_until, last_until;

        bool by_all(int first, int last) const { return last_from <= first && last <= first_until; }
        bool by_none(int first, int last) const { return last < first_from || last_until < first; }
    };

    explicit TokenTiles(const antkv_layer& layer)
        : layer_(layer), size_(layer.head_size), padded_(padded_head_size(layer)), tiles_(floats(kMax * kTokens * padded_)),
          keys_(floats(kBlockSize * padded_)), values_(floats(kBlockSize * padded_)) {
        // Channels behind the last one stay 0.
        std::fill_n(keys_.get(), kBlockSize * padded_, 0.0f);
        std::fill_n(values_.get(), kBlockSize * padded_, 0.0f);
    }

    // Fills tiles with the tokens that queries at begin .. end see through their codes, and calls use(how many times 32)
    // whenever no more fit, and at the end.
    template <typename Use>
    void coded(const Sequence& sequence, int begin, int end, Use use) {
        begin_ = begin, end_ = end;
        for (int first = sequence.first_visible(begin) / kBlockSize * kBlockSize; first < end; first += kBlockSize) {
            // A query sees the anchors of the blocks before its own: its own is decoded a second time, without them.
            coded_block(sequence, first, false, use);
            coded_block(sequence, first, true, use);
        }
        use(std::exchange(count_, 0));
    }

    // The same with the tokens that queries of the VQ block from `first` on see in full precision, as far as they are among
    // begin .. end.
    template <typename Use>
    void exact(const Sequence& sequence, int first, int begin, int end, antkv_rows key, antkv_rows value, Use use) {
        begin_ = std::max(begin, first), end_ = std::min(end, first + kBlockSize);
        ExactRows rows;
        int count = 0;
        for (int position = sequence.first_visible(first); position < end_; ++position) {
            const int last = last_query(sequence, position), from = std::max(first, position);
            if (last < from) continue;  // the same tokens for all queries of the block, wherever the run begins
            from_[count] = from;
            until_[count] = std::min(last, first + kBlockSize - 1);
            if (last < begin_) {  // the row may be gone
                rows.keys[count] = rows.values[count] = kNothing;
            } else {
                rows.keys[count] = (const BFloat*)sequence.exact_row(key, false, position);
                rows.values[count] = (const BFloat*)sequence.exact_row(value, true, position);
            }
            if (++count == kBlockSize) pack_exact(rows, std::exchange(count, 0), use);
        }
        pack_exact(rows, count, use);
        use(std::exchange(count_, 0));
    }

    const Seen& seen(int index) const { return seen_[index]; }
    // (2, padded / 32) tiles of 16 tokens and 32 channels.
    Operand keys(int index) const { return {tiles(index), kTileElements, (int64_t)kTileRows * padded_}; }
    // Tiles of 16 channels from `channel` on and 32 tokens, of as many times 32 tokens as one likes.
    Operand values(int index, int channel) const {
        return {tiles(index) + kTokens * (padded_ + channel), 2 * kTokens * padded_, kTileElements};
    }

  private:
    // Of tokens in full precision.
    struct ExactRows {
        const BFloat *keys[kBlockSize], *values[kBlockSize];
    };
    static constexpr BFloat kNothing[kMaxHeadSize] = {};

    BFloat* tiles(int index) const { return (BFloat*)tiles_.get() + (int64_t)index * 2 * kTokens * padded_; }

    // The last query that sees a token in full precision.
    int last_query(const Sequence& sequence, int position) const {
        const bool in_hand = !layer_.prefill_reads_cache && position >= sequence.start;
        return std::min(in_hand ? INT32_MAX : layer_.last_query[position], sequence.last_that_sees(position));
    }

    // The tokens of a block, for the queries in it or for those behind it.
    template <typename Use>
    void coded_block(const Sequence& sequence, int first, bool own, Use use) {
        const int begin = own ? first : first + kBlockSize, end = std::min(own ? first + kBlockSize : end_, end_);
        const int count = std::min(kBlockSize, end_ - first);
        if (end <= std::max(begin, begin_)) return;
        bool any = false;
        for (int t = 0; t < count; ++t) {
            const int last = last_query(sequence, first + t);
            from_[t] = std::max({last + 1, first + t, begin});
            until_[t] = std::min(end - 1, sequence.last_that_sees(first + t));
            any |= std::max(from_[t], begin_) <= until_[t];
        }
        if (!any) return;
        const VQPage page = sequence.vq_page(first / kBlockSize);
        turned_keys(sequence, first, count, keys_.get());
        decode_rows(layer_, sequence.head, true, page.codes(true, 0), count, values_.get());
        for (int anchor = 0; !own && anchor < layer_.anchor_rows; ++anchor) {
            correct(page, anchor, false, keys_.get());
            correct(page, anchor, true, values_.get());
        }
        widen_rows(count);
        pack_coded(count, use);
    }
    // Rows of head_size channels to rows of `padded_`.
    void widen_rows(int count) {
        for (int t = count - 1; padded_ > size_ && t >= 0; --t) {
            for (float* rows : {keys_.get(), values_.get()}) {
                std::memmove(rows + t * padded_, rows + t * size_, size_ * sizeof(float));
                std::fill_n(rows + t * padded_ + size_, padded_ - size_, 0.0f);
            }
        }
    }

    // Rows of `count` tokens to tiles.
    template <typename Use>
    void pack_coded(int count, Use use) {
        const int padded = rounded_up(count, kTokens);
        for (float* rows : {keys_.get(), values_.get()})
            std::fill(rows + count * padded_, rows + padded * padded_, 0.0f);
        pack(count, use, [&](int first, BFloat* keys, BFloat* values) {
            pack_keys(&keys_[first * padded_], keys);
            pack_values(&values_[first * padded_], values);
        });
    }
    template <typename Use>
    void pack_exact(ExactRows& rows, int count, Use use) {
        for (int t = count; t < rounded_up(count, kTokens); ++t) rows.keys[t] = rows.values[t] = kNothing;
        pack(count, use, [&](int first, BFloat* keys, BFloat* values) {
            for (int t = 0; t < kTokens; t += kTileRows)
                load_row_tiles(layer_, kTileRows, [&](int i) { return rows.keys[first + t + i]; }, keys + t * padded_);
            pack_values(rows.values + first, values);
        });
    }
    // fill(first, keys, values): tiles of 32 tokens.
    template <typename Use, typename Fill>
    void pack(int count, Use use, Fill fill) {
        const int padded = rounded_up(count, kTokens);
        std::fill(from_ + count, from_ + padded, INT32_MAX);
        std::fill(until_ + count, until_ + padded, -1);
        for (int first = 0; first < padded; first += kTokens) {
            pack_seen(first, seen_[count_]);
            fill(first, tiles(count_), tiles(count_) + kTokens * padded_);
            if (++count_ == kMax) use(std::exchange(count_, 0));
        }
    }
    void pack_seen(int first, Seen& to) const {
        std::copy_n(from_ + first, kTokens, to.from);
        std::copy_n(until_ + first, kTokens, to.until);
        to.first_from = *std::min_element(to.from, to.from + kTokens);
        to.last_from = *std::max_element(to.from, to.from + kTokens);
        to.first_until = *std::min_element(to.until, to.until + kTokens);
        to.last_until = *std::max_element(to.until, to.until + kTokens);
    }
    void pack_keys(const float* rows, BFloat* to) const {
        for (int t = 0; t < kTokens; ++t, rows += padded_) {
            BFloat* row = to + t / kTileRows * kTileRows * padded_ + t % kTileRows * kTileDepth;
            for (int c = 0; c < padded_; c += kTileDepth, row += kTileElements)
                store_pairs(row, to_bfloat16(load_lanes(rows + c), load_lanes(rows + c + kLanes)));
        }
    }
    void pack_values(const float* rows, BFloat* to) const {
        for (int c = 0; c < padded_; c += kLanes) {
            Lanes low[kLanes], high[kLanes];
            for (int t = 0; t < kLanes; ++t) {
                low[t] = load_lanes(rows + t * padded_ + c);
                high[t] = load_lanes(rows + (t + kLanes) * padded_ + c);
            }
            transpose(low);
            transpose(high);
            for (int i = 0; i < kLanes; ++i, to += kTokens) store_pairs(to, to_bfloat16(low[i], high[i]));
        }
    }
    // The same of rows in bfloat16.
    void pack_values(const BFloat* const* rows, BFloat* to) const {
        for (int c = 0; c < padded_; c += kTileDepth) {
            Lanes low[kLanes], high[kLanes];
            for (int t = 0; t < kLanes; ++t) {
                low[t] = (Lanes)load_channels(rows[t], c, size_);
                high[t] = (Lanes)load_channels(rows[t + kLanes], c, size_);
            }
            transpose(low);
            transpose(high);
            for (int pair = 0; pair < kLanes; ++pair, to += 2 * kTokens) {
                store_pairs(to, firsts_of_pairs((BitLanes)low[pair], (BitLanes)high[pair]));
                store_pairs(to + kTokens, seconds_of_pairs((BitLanes)low[pair], (BitLanes)high[pair]));
            }
        }
    }

    const antkv_layer& layer_;
    const int size_, padded_;
    int begin_ = 0, end_ = 0, count_ = 0;
    Buffer tiles_, keys_, values_;
    Seen seen_[kMax];
    int32_t from_[kBlockSize], until_[kBlockSize];
};

}  // namespace antkv
