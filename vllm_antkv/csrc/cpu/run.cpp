// All that a layer does in a step, in one call: three calls from Python cost more than the attention of a short context.
#include <omp.h>

#include "operations.h"

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

extern "C" int64_t antkv_run(const antkv_layer* layer, const antkv_step* step, const antkv_work* work) noexcept {
    using namespace antkv;
    int64_t chosen = 0;
    timed(work->timings[0], [&] { encode_store(*layer, *step, *work); });
    if (layer->anchor_rows) timed(work->timings[1], [&] { chosen = anchor_score(*layer, *step, *work); });
    timed(work->timings[2], [&] { attend(*layer, *step, *work); });
    return chosen;
}

extern "C" void antkv_attend(const antkv_layer* layer, const antkv_step* step, const antkv_work* work) noexcept {
    antkv::attend(*layer, *step, *work);
}
