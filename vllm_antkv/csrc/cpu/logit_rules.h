// How products of queries and keys become logits: LogitRules of vllm_antkv/ops/logits.py.
#pragma once

#include "antkv.h"
#include "simd.h"

namespace antkv {

// By what products are multiplied in the softmax: those that were capped are logits.
inline float softmax_scale(const antkv_layer& layer) { return layer.soft_cap ? 1 : layer.scale; }

// Products, times `scale`, to capped logits, where the layer has a cap; else they stay. count: a multiple of W.
inline void cap_logits(const antkv_layer& layer, float scale, float* products, int count) {
    if (!layer.soft_cap) return;
    const Vec factor = broadcast(2 * scale / layer.soft_cap);
    for (int i = 0; i < count; i += W) {
        // tanh x = 1 - 2 / (e^2x + 1), which is 1 in float32 from 10 on.
        Vec twice = load(products + i) * factor;
        twice = twice > 20.0f ? broadcast(20) : twice;
        twice = twice < -20.0f ? broadcast(-20) : twice;
        store(products + i, layer.soft_cap - 2 * layer.soft_cap / (exponential(twice) + 1));
    }
}

}  // namespace antkv
