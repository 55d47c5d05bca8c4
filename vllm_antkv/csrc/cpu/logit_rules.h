// How products of queries and keys become logits: LogitRules of vllm_antkv/ops/logits.py.
#pragma once

#include "antkv.h"
#include "simd.h"

namespace antkv {

// By what products are multiplied in the softmax: those that were capped are logits.
inline float softmax_scale(const antkv_layer& layer) { return layer.soft_cap ? 1 : layer.scale; }

// What is added to the products of a query, in float32 and in the model's order, with coded keys that are no anchors:
// jensen_bias of vllm_antkv/ops/reference.py, in units of products.
inline float jensen_bias(const antkv_layer& layer, int query_head, const float* query) {
    if (!layer.jensen_weights) return 0;
    const float* weights = layer.jensen_weights + (int64_t)query_head * layer.head_size;
    Vec total = {};
    for (int c = 0; c < layer.head_size; c += W) total += load(query + c) * load(query + c) * load(weights + c);
    return sum(total);
}

// Products and a bias, times `scale`, to capped logits, where the layer has a cap; else they stay. count: a multiple of W.
inline void cap_logits(const antkv_layer& layer, float scale, float bias, float* products, int count) {
    if (!layer.soft_cap) return;
    const Vec factor = broadcast(2 * scale / layer.soft_cap);
    for (int i = 0; i < count; i += W) {
        // tanh x = 1 - 2 / (e^2x + 1), which is 1 in float32 from 10 on.
        Vec twice = (load(products + i) + bias) * factor;
        twice = twice > 20.0f ? broadcast(20) : twice;
        twice = twice < -20.0f ? broadcast(-20) : twice;
        store(products + i, layer.soft_cap - 2 * layer.soft_cap / (exponential(twice) + 1));
    }
}

}  // namespace antkv
