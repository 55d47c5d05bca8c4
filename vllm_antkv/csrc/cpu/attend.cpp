// The attention of a step: prompts through `Prefill`, queries behind them through `Decode`.
#include <omp.h>

#include <atomic>
#include <vector>

#include "decode.h"
#include "memory.h"
#include "operations.h"
#include "prefill.h"

namespace antkv {
namespace {

struct Task {
    int request, head, index;  // split of a decode, or first query of a run
};

// Tasks dealt out to threads in runs of neighbours, which share centroids: a thread does its own run, then helps others.
class Runs {
  public:
    explicit Runs(int64_t count) : count_(count), taken_(omp_get_max_threads()) {}

    // Called by every thread of a parallel region.
    template <typename Task>
    void work(Task task) {
        const int64_t num_runs = taken_.size();
        for (int64_t i = 0; i < num_runs; ++i) {
            const int64_t run = (omp_get_thread_num() + i) % num_runs;
            const int64_t begin = run * count_ / num_runs, end = (run + 1) * count_ / num_runs;
            for (int64_t at; (at = begin + taken_[run]++) < end;) task(at);
        }
    }

  private:
    const int64_t count_;
    std::vector<std::atomic<int64_t>> taken_;
};

}  // namespace

static void decode_all(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    std::vector<Task> splits, merges;
    std::vector<size_t> first_split;
    int64_t num_coded = 0;  // of a head
    // Head by head, so that a thread keeps the centroids of one in its cache.
    for (int head = 0; head < layer.num_kv_heads; ++head) {
        for (int request = 0; request < step.num_reqs; ++request) {
            if (!is_decode(step, request, work.is_prefilling)) continue;
            merges.push_back({request, head, 0});
            first_split.push_back(splits.size());
            const Sequence sequence(layer, step, request, head);
            if (head == 0) num_coded += Decode::num_coded(sequence);
            for (int i = Decode::first_split(sequence); i < Decode::end_split(sequence); ++i)
                splits.push_back({request, head, i});
        }
    }
    if (merges.empty()) return;
    const int64_t stride = Decode::partial_size(layer);
    const Buffer partials = floats(splits.size() * stride);
    Runs runs(splits.size());
    const bool reads_tables = Decode::reads_tables(layer, num_coded);
#pragma omp parallel
    {
        const Buffer scratch = floats(Decode::scratch_size(layer));
        int head = -1;
        runs.work([&](int64_t i) {
            if (reads_tables && splits[i].head != head) Decode::read_tables(layer, head = splits[i].head);
            const Sequence sequence(layer, step, splits[i].request, splits[i].head);
            Decode::split(sequence, work, splits[i].index, scratch.get(), &partials[i * stride]);
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (size_t i = 0; i < merges.size(); ++i) {
            const Sequence sequence(layer, step, merges[i].request, merges[i].head);
            Decode::merge(sequence, work.output, &partials[first_split[i] * stride]);
        }
    }
}

static void prefill_all(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    std::vector<Task> runs;
    for (int request = 0; request < step.num_reqs; ++request) {
        if (is_decode(step, request, work.is_prefilling)) continue;
        for (int head = 0; head < layer.num_kv_heads; ++head) {
            const Sequence sequence(layer, step, request, head);
            // The longest first.
            for (int end = sequence.end, begin; end > sequence.start; end = begin) {
                const int block = (end - 1) / kBlockSize * kBlockSize, length = Prefill::run_length(layer);
                begin = std::max(block + (end - 1 - block) / length * length, sequence.start);
                runs.push_back({request, head, begin});
            }
        }
    }
    if (runs.empty()) return;
#pragma omp parallel
    {
        Prefill prefill(layer);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < runs.size(); ++i) {
            const Sequence sequence(layer, step, runs[i].request, runs[i].head);
            const int begin = runs[i].index, block = begin / kBlockSize * kBlockSize;
            const int length = Prefill::run_length(layer);
            const int end = std::min({block + ((begin - block) / length + 1) * length, block + kBlockSize, sequence.end});
            prefill.run(sequence, begin, end, work);
        }
    }
}

void attend(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    decode_all(layer, step, work);
    if (!prefill_in_tiles(layer, step, work)) prefill_all(layer, step, work);
}

}  // namespace antkv
