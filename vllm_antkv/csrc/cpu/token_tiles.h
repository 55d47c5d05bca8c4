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
        uint32_t anchors;  // bits of tokens whose K is an anchor

        bool by_all(int first, int last) const { return last_from <= first && last <= first_until; }
        bool by_none(int first, int last) const { return last < first_from || last_until < first; }
    };

    explicit TokenTiles(const antkv_layer& layer)
        : layer_(layer), size_(layer.head_size), padded_(padded_head_size(layer)), tiles_(floats(kMax * kTokens * padded_)),
          keys_(floats(kBlockSize * size_ / 2)), values_(floats(kBlockSize * size_ / 2)), decoded_(floats(kBlockSize * size_)) {}

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

    // The same with the tokens that queries at first .. stop see in full precision, as far as these are among begin .. end.
    template <typename Use>
    void exact(const Sequence& sequence, int first, int stop, int begin, int end, antkv_rows key, antkv_rows value, Use use) {
        begin_ = std::max(begin, first), end_ = std::min(end, stop);
        Rows rows;
        int count = 0;
        for (int position = sequence.first_visible(first); position < end_; ++position) {
            const int last = last_query(sequence, position), from = std::max(first, position);
            if (last < from) continue;  // the same tokens for all of these queries, wherever the run begins
            from_[count] = from;
            until_[count] = std::min(last, stop - 1);
            if (last < begin_) {  // the row may be gone
                rows.keys[count] = rows.values[count] = kNothing;
            } else {
                rows.keys[count] = (const BFloat*)sequence.exact_row(key, false, position);
                rows.values[count] = (const BFloat*)sequence.exact_row(value, true, position);
            }
            if (++count == kBlockSize) pack(rows, std::exchange(count, 0), use);
        }
        pack(rows, count, use);
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
    struct Rows {
        const BFloat *keys[kBlockSize], *values[kBlockSize];
        uint32_t anchors[kBlockSize / kTokens] = {};  // as in `Seen`
    };
    static constexpr BFloat kNothing[kMaxHeadSize] = {};

    BFloat* tiles(int index) const { return (BFloat*)tiles_.get() + (int64_t)index * 2 * kTokens * padded_; }

    // The last query that sees a token in full precision.
    int last_query(const Sequence& sequence, int position) const {
        const int last = layer_.last_query[position];
        const bool by_all = !layer_.prefill_reads_cache && last >= sequence.start;
        return std::min(by_all ? INT32_MAX : last, sequence.last_that_sees(position));
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
        decode_keys(sequence, first, count);
        decode_values(sequence.head, page, count);
        Rows rows;
        for (int anchor = 0; !own && anchor < layer_.anchor_rows; ++anchor) {
            decode_anchor(sequence, first, anchor, false);
            decode_anchor(sequence, first, anchor, true);
            const int offset = page.anchor_offsets(false)[anchor], t = offset % kExactAnchor;
            if (offset >= 0) rows.anchors[t / kTokens] |= 1u << t % kTokens;
        }
        for (int t = 0; t < count; ++t) {
            rows.keys[t] = key(t);
            rows.values[t] = value(t);
        }
        pack(rows, count, use);
    }
    BFloat* key(int t) const { return (BFloat*)keys_.get() + t * size_; }
    BFloat* value(int t) const { return (BFloat*)values_.get() + t * size_; }

    // The tokens of a VQ page from `first` on.
    void decode_keys(const Sequence& sequence, int first, int count) const {
        const uint8_t* codes = sequence.vq_page(first / kBlockSize).codes(false, 0);
        if (layer_.positions || !layer_.cos || !layer_.is_neox_style || layer_.rotary_dim % (2 * kLanes)) {
            rotated_keys(sequence, first, count, decoded_.get());
            narrow(layer_, decoded_.get(), count * size_, key(0));
            return;
        }
        with_centroids(layer_, sequence.head, layer_.k_centroids, [&](auto centroids) {
            const int half = layer_.rotary_dim / 2;
            for (int c = 0; c < half; c += kLanes) rotate_channels(centroids, codes, first, count, c, c + half);
            for (int c = 2 * half; c < size_; c += kLanes)
                for (int t = 0; t < count; ++t)
                    store_sixteen(key(t) + c, sixteen_channels(centroids, codes + t * layer_.code_bytes, c));
        });
    }
    // 16 channels, and those that rotate with them: by a token's place in the block, and by that of the block.
    template <typename Table>
    void rotate_channels(Table centroids, const uint8_t* codes, int first, int count, unsigned c, unsigned partner) const {
        const Angles base(layer_, first);
        const Lanes scale = to_all_lanes(1 / layer_.rotary_magnitude);
        const Lanes base_cos = load_lanes(base.cos + c) * scale, base_sin = load_lanes(base.sin + c) * scale;
        const Table from_c = centroids.from(c), from_partner = centroids.from(partner);
        const uint8_t *a_codes = codes + Table::byte_of(c), *b_codes = codes + Table::byte_of(partner);
        const int64_t code_bytes = layer_.code_bytes, num_angles = layer_.rotary_dim / 2, size = size_;
        const float *cos = layer_.cos + c, *sin = layer_.sin + c;
        BFloat *to = key(0) + c, *to_partner = key(0) + partner;
        for (int t = 0; t < count; ++t) {
            const Lanes a = sixteen_channels(from_c, a_codes + t * code_bytes, c % Table::kByteAligned);
            const Lanes b = sixteen_channels(from_partner, b_codes + t * code_bytes, partner % Table::kByteAligned);
            const Lanes cosine = load_lanes(cos + t * num_angles), sine = load_lanes(sin + t * num_angles);
            const Lanes x = a * cosine - b * sine, y = b * cosine + a * sine;
            store_sixteen(to + t * size, x * base_cos - y * base_sin);
            store_sixteen(to_partner + t * size, y * base_cos + x * base_sin);
        }
    }
    void decode_values(int head, VQPage page, int count) const {
        with_centroids(layer_, head, layer_.v_bfloat16, [&](auto centroids) {
            using Table = decltype(centroids);
            const int64_t code_bytes = layer_.code_bytes, size = size_;
            for (unsigned c = 0; c < size; c += kLanes) {
                const Table from = centroids.from(c);
                const uint8_t* codes = page.codes(true, 0) + Table::byte_of(c);
                BFloat* to = value(0) + c;
                for (int t = 0; t < count; ++t)
                    _mm256_storeu_si256((__m256i*)(to + t * size), from.sixteen(codes + t * code_bytes, c % Table::kByteAligned));
            }
        });
    }
    // The row of an anchor, in float32 before it is rounded.
    void decode_anchor(const Sequence& sequence, int first, int anchor, bool of_values) const {
        const VQPage page = sequence.vq_page(first / kBlockSize);
        const int offset = page.anchor_offsets(of_values)[anchor], t = offset % kExactAnchor;
        if (offset < 0) return;
        float* row = &decoded_[t * size_];
        if (of_values) decode_rows(layer_, sequence.head, true, page.codes(true, t), 1, row);
        else rotated_keys(sequence, first + t, 1, row);
        correct(page, anchor, of_values, decoded_.get());
        narrow(layer_, row, size_, of_values ? value(t) : key(t));
    }

    // Rows of `count` tokens to tiles.
    template <typename Use>
    void pack(Rows& rows, int count, Use use) {
        const int padded = rounded_up(count, kTokens);
        for (int t = count; t < padded; ++t) {
            from_[t] = INT32_MAX;
            until_[t] = -1;
            rows.keys[t] = rows.values[t] = kNothing;
        }
        for (int first = 0; first < padded; first += kTokens) {
            BFloat *keys = tiles(count_), *values = keys + kTokens * padded_;
            pack_seen(first, seen_[count_]);
            seen_[count_].anchors = rows.anchors[first / kTokens];
            for (int t = 0; t < kTokens; t += kTileRows)
                load_row_tiles(layer_, kTileRows, [&](int i) { return rows.keys[first + t + i]; }, keys + t * padded_);
            pack_values(rows.values + first, values);
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
    Buffer tiles_;
    Buffer keys_, values_, decoded_;  // (kBlockSize, head_size): bfloat16, but `decoded_` float32
    Seen seen_[kMax];
    int32_t from_[kBlockSize], until_[kBlockSize];
};

}  // namespace antkv
