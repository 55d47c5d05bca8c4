// The attention of a step: prompts through `Prefill`, queries behind them through `Decode`.
#include <omp.h>

#include <atomic>

#include "decode.h"
#include "memory.h"
#include "operations.h"
#include "prefill.h"

namespace antkv {
namespace {

struct Task {
    int request, head, query;  // first of a run
};

// A run of queries behind a prompt, and what its splits leave.
struct DecodeRun {
    int request, head, first, end;
    int num_rows;
    int64_t partials;  // of its first split

    Sequence until(const antkv_layer& layer, const antkv_step& step, int query) const {
        return Sequence(layer, step, request, head).until(query);
    }
};

struct DecodeSplit {
    int64_t run, partial;
    int index;
};

struct DecodeMerge {
    int64_t run;
    int query;
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
    Vector<std::atomic<int64_t>> taken_;
};

}  // namespace

static void decode_all(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    Vector<DecodeRun> runs;
    Vector<DecodeSplit> splits;
    Vector<DecodeMerge> merges;
    const int group = num_queries_per_kv(layer);
    int most_rows = 0;
    int64_t num_coded = 0, num_floats = 0;  // of a head, of all partial results
    // Head by head, so that a thread keeps the centroids of one in its cache.
    for (int head = 0; head < layer.num_kv_heads; ++head) {
        for (int request = 0; request < step.num_reqs; ++request) {
            if (!is_decode(layer, step, request, work.is_prefilling)) continue;
            const Sequence whole(layer, step, request, head);
            for (int first = whole.start, end; first < whole.end; first = end) {
                end = Decode::end_of_run(whole, first);
                const Sequence sequence = whole.until(end - 1);
                const int num_rows = (end - first) * group;
                const int64_t run = runs.size();
                runs.push_back({request, head, first, end, num_rows, num_floats});
                most_rows = std::max(most_rows, num_rows);
                if (head == 0) num_coded += Decode::num_coded(sequence);
                for (int i = Decode::first_split(sequence); i < Decode::end_split(sequence); ++i) {
                    splits.push_back({run, num_floats, i});
                    num_floats += Decode::partial_size(layer, num_rows);
                }
                for (int query = first; query < end; ++query) merges.push_back({run, query});
            }
        }
    }
    if (merges.empty()) return;
    const Buffer partials = floats(num_floats);
    Runs shares(splits.size());
    const bool reads_tables = Decode::reads_tables(layer, num_coded);
#pragma omp parallel
    {
        const Buffer scratch = floats(Decode::scratch_size(layer, most_rows));
        int head = -1;
        shares.work([&](int64_t i) {
            const DecodeRun& run = runs[splits[i].run];
            if (reads_tables && run.head != head) Decode::read_tables(layer, head = run.head);
            Decode::split(run.until(layer, step, run.end - 1), run.first, work, splits[i].index, scratch.get(),
                          &partials[splits[i].partial]);
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (size_t i = 0; i < merges.size(); ++i) {
            const DecodeRun& run = runs[merges[i].run];
            const int query = merges[i].query;
            Decode::merge(run.until(layer, step, query), work.output, &partials[run.partials], run.num_rows,
                          (query - run.first) * group);
        }
    }
}

static void prefill_all(const antkv_layer& layer, const antkv_step& step, const antkv_work& work) {
    Vector<Task> runs;
    for (int request = 0; request < step.num_reqs; ++request) {
        if (is_decode(layer, step, request, work.is_prefilling)) continue;
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
            const int begin = runs[i].query, block = begin / kBlockSize * kBlockSize;
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
