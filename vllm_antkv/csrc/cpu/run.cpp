// All that a layer does in a step, in one call: three calls from Python cost more than the attention of a short context.
#include <omp.h>

#include "antkv.h"
#include "memory.h"

namespace antkv {
namespace {

template <typename Operation>
void timed(antkv_timing& timing, Operation operation) {
    const double start = omp_get_wtime();
    operation();
    timing.seconds += omp_get_wtime() - start;
    ++timing.calls;
}

}  // namespace
}  // namespace antkv

extern "C" int64_t antkv_run(const antkv_layer* layer, const antkv_step* step, const antkv_work* work) {
    using namespace antkv;
    const antkv_rows query = work->query, key = work->key, value = work->value;
    const bool votes_on_prompt = layer->prompt_scope && layer->anchor_rows;
    int64_t chosen = 0;
    Buffer lse;
    const auto attend = [&] {
        timed(work->timings[2], [&] {
            antkv_attend(layer, step, query, key, value, work->output, lse.get(), work->is_prefilling);
        });
    };
    timed(work->timings[0], [&] { antkv_encode_store(layer, step, key, value); });
    if (votes_on_prompt) {
        lse = floats((size_t)step->query_start_loc[step->num_reqs] * layer->num_heads);
        attend();
    }
    if (layer->anchor_rows) {
        timed(work->timings[1], [&] {
            chosen = antkv_anchor_score(layer, step, query, key, value, work->is_sink, lse.get());
        });
    }
    if (!votes_on_prompt) attend();
    return chosen;
}
