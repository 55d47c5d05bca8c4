// The three operations of a step, in their order.
#pragma once

#include "antkv.h"

namespace antkv {

// Writes the codes of the step's tokens, and the full-precision rows of those that own a recency page.
void encode_store(const antkv_layer&, const antkv_step&, const antkv_work&);

// Adds the votes of the step's queries, and chooses the anchors of the blocks that close; returns how many rows.
int64_t anchor_score(const antkv_layer&, const antkv_step&, const antkv_work&);

void attend(const antkv_layer&, const antkv_step&, const antkv_work&);

// Of `attend`, all requests that do not decode (`is_decode`), by tiles. False where the layer has none.
bool prefill_in_tiles(const antkv_layer&, const antkv_step&, const antkv_work&);

}  // namespace antkv
