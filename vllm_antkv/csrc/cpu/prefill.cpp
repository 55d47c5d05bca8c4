#include "prefill.h"

#include <cmath>

#include "gemm.h"
#include "logit_rules.h"
#include "codes.h"

namespace antkv {

Prefill::Prefill(const antkv_layer& layer)
    : layer_(layer), group_(num_queries_per_kv(layer)), size_(layer.head_size),
      max_rows_(run_length(layer) * group_), queries_(floats(max_rows_ * size_)), outputs_(floats(max_rows_ * size_)),
      logits_(floats(max_rows_ * kBlockSize)), keys_(floats(kBlockSize * size_)), columns_(floats(kBlockSize * size_)),
      values_(floats(kBlockSize * size_)), max_(floats(max_rows_)), total_(floats(max_rows_)),
      bias_(floats(max_rows_)) {}

void Prefill::run(const Sequence& sequence, int begin, int end, const antkv_work& work) {
    rows_ = (end - begin) * group_;
    const auto token_of = [&](int row) { return sequence.first + begin + row / group_ - sequence.start; };
    const auto head_of = [&](int row) { return sequence.head * group_ + row % group_; };
    const auto load_queries = [&](bool of_codes) {
        for (int row = 0; row < rows_; ++row) {
            float* to = &queries_[(int64_t)row * size_];
            widen(layer_, row_of(layer_, work.query, token_of(row), head_of(row)), size_, to);
            if (of_codes) {
                bias_[row] = jensen_bias(layer_, head_of(row), to) * layer_.scale;
                to_code_order(layer_, to);
            }
            for (int c = 0; c < size_; ++c) to[c] *= layer_.scale;
        }
    };
    std::fill_n(outputs_.get(), (int64_t)rows_ * size_, 0.0f);
    for (int row = 0; row < rows_; ++row) {
        max_[row] = layer_.sinks ? layer_.sinks[head_of(row)] : -kInfinity;
        total_[row] = layer_.sinks ? 1 : 0;
    }
    load_queries(true);
    coded_tiles(sequence, begin, end);
    if (layer_.k_order) load_queries(false);
    exact_tiles(sequence, begin, end, work.key, work.value);
    for (int row = 0; row < rows_; ++row) {
        float* from = &outputs_[(int64_t)row * size_];
        const float scale = 1 / total_[row];
        for (int c = 0; c < size_; ++c) from[c] *= scale;
        narrow(layer_, from, size_, row_of(layer_, work.output, token_of(row), head_of(row)));
    }
}

void Prefill::coded_tiles(const Sequence& sequence, int begin, int end) {
    const int own = begin / kBlockSize;
    for (int block = sequence.first_visible(begin) / kBlockSize; block <= own; ++block) {
        const int first = block * kBlockSize, count = std::min(kBlockSize, end - first);
        // A token is seen exactly first, then through its code, then not at all.
        bool any = false, all = block < own;
        for (int position = first; position < first + count; ++position) {
            const int last = std::min(end - 1, sequence.last_that_sees(position));
            any |= last >= begin && sequence.sees_code(last, position);
            all &= sequence.sees_code(begin, position) && sequence.sees_code(end - 1, position);
        }
        if (!any) continue;
        const VQPage page = sequence.vq_page(block);
        rotated_keys(sequence, first, count, keys_.get());
        decode_rows(layer_, sequence.head, true, page.codes(true, 0), count, values_.get());
        Vector<int> anchors;
        for (int row = 0; block < own && row < layer_.anchor_rows; ++row) {
            correct(page, row, false, keys_.get());
            correct(page, row, true, values_.get());
            const int offset = page.anchor_offsets(false)[row];
            if (offset >= 0) anchors.push_back(offset % kExactAnchor);
        }
        add_tile(begin, count, all, &anchors, [&](int query, int column) {
            return first + column <= query && sequence.sees_code(query, first + column);
        });
    }
}

void Prefill::exact_tiles(const Sequence& sequence, int begin, int end, antkv_rows key, antkv_rows value) {
    int positions[kBlockSize], count = 0;
    // Whoever sees a token first sees it longest: the first query at or behind it.
    const auto seen_from = [&](int first, int position) {
        return sequence.sees_exactly(std::max(first, position), position);
    };
    bool any = false;
    const auto flush = [&] {
        if (any) {
            add_tile(begin, count, false, nullptr, [&](int query, int column) {
                return positions[column] <= query && sequence.sees_exactly(query, positions[column]);
            });
        }
        any = false;
        count = 0;
    };
    // Tiles hold what the queries of the whole VQ block see, so that sums do not depend on where the run begins.
    const int block = begin / kBlockSize * kBlockSize;
    for (int position = sequence.first_visible(block); position < end; ++position) {
        if (!seen_from(block, position)) continue;
        float *to_key = &keys_[(int64_t)count * size_], *to_value = &values_[(int64_t)count * size_];
        if (seen_from(begin, position)) {
            widen(layer_, sequence.exact_row(key, false, position), size_, to_key);
            widen(layer_, sequence.exact_row(value, true, position), size_, to_value);
            any = true;
        } else {  // the row may be gone
            std::fill_n(to_key, size_, 0.0f);
            std::fill_n(to_value, size_, 0.0f);
        }
        positions[count++] = position;
        if (count == kBlockSize) flush();
    }
    flush();
}

template <typename Visible>
void Prefill::add_tile(int begin, int count, bool all_visible, const Vector<int>* anchors, Visible visible) {
    const int padded = (count + W - 1) / W * W;
    transpose(count, size_, keys_.get(), columns_.get(), kBlockSize);
    gemm<false>(rows_, padded, size_, queries_.get(), size_, columns_.get(), kBlockSize, logits_.get(), kBlockSize);
    for (int row = 0; row < rows_; ++row) {
        float* logits = &logits_[(int64_t)row * kBlockSize];
        // Added to all logits, and before taken from those of anchors.
        const float bias = anchors ? bias_[row] : 0, later = layer_.soft_cap ? 0 : bias;
        if (bias)
            for (const int column : *anchors) logits[column] -= bias;
        // Queries have been scaled.
        cap_logits(layer_, 1, bias, logits, padded);
        if (!all_visible) {
            const int query = begin + row / group_;
            for (int column = 0; column < count; ++column)
                if (!visible(query, column)) logits[column] = -kInfinity;
        }
        std::fill(logits + count, logits + padded, -kInfinity);
        Vec top = broadcast(-kInfinity);
        for (int column = 0; column < padded; column += W) top = maximum(top, load(logits + column));
        const float max = std::max(max_[row], largest(top) + later);
        if (max == -kInfinity) {  // sees nothing of this tile, nor of those before
            std::fill(logits, logits + padded, 0.0f);
            continue;
        }
        const Vec offset = broadcast(max - later);
        Vec totals = {};
        for (int column = 0; column < padded; column += W) {
            const Vec weight = exponential(load(logits + column) - offset);
            totals += weight;
            store(logits + column, weight);
        }
        const float rescale = max_[row] == max ? 1 : std::exp(max_[row] - max);
        total_[row] = total_[row] * rescale + sum(totals);
        max_[row] = max;
        if (rescale != 1) {
            float* output = &outputs_[(int64_t)row * size_];
            for (int c = 0; c < size_; ++c) output[c] *= rescale;
        }
    }
    gemm<true>(rows_, size_, count, logits_.get(), kBlockSize, values_.get(), size_, outputs_.get(), size_);
}

}  // namespace antkv
