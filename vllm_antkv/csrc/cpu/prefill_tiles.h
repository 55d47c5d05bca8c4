#pragma once

#include "pages.h"

namespace antkv {

// Rows of a step, (num_tokens, heads, head_size); lse: (num_tokens, num_heads) or null.
struct StepRows {
    antkv_rows query, key, value, output;
    float* lse;
};

// Attention of all requests that do not decode (`is_decode`), by tiles. False where the layer has none.
bool prefill_in_tiles(const antkv_layer&, const antkv_step&, const uint8_t* is_prefilling, const StepRows&);

}  // namespace antkv
