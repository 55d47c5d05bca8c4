// The softmax of prefill by tiles: logits of 32 tokens and 32 queries to weights in bfloat16, relative to powers of two.
#pragma once

#include <cmath>

#include "powers.h"
#include "token_tiles.h"

namespace antkv {

constexpr int kStrip = 2 * kTileRows;  // rows, queries x heads, that are multiplied at once
constexpr int kTokens = TokenTiles::kTokens;
// Outputs are scaled when weights have grown by so many powers of two: they have the exponents of float32.
constexpr float kSlack = 16;

struct Strip {
    float* outputs;      // (padded head size, kStrip), relative to max
    float *max, *total;  // (kStrip), of logits as powers of two
    float* bias;         // (kStrip), see `jensen_bias`
    BFloat* queries;     // (2, padded head size / 32) tiles
    int32_t* positions;  // (kStrip)
    int first, last;     // positions
};

// Logits of tokens that a query does not see become -infinity.
inline void hide(const Strip& strip, const TokenTiles::Seen& tokens, float* logits) {
    for (int lane = 0; lane < kStrip; lane += kLanes) {
        IntLanes queries;
        std::memcpy(&queries, strip.positions + lane, sizeof queries);
        for (int t = 0; t < kTokens; ++t) {
            float* at = logits + t * kStrip + lane;
            const IntLanes seen = (queries >= tokens.from[t]) & (queries <= tokens.until[t]);
            store_lanes(at, seen ? load_lanes(at) : to_all_lanes(-kInfinity));
        }
    }
}

// The running softmax of a strip, in registers.
struct Softmax {
    Lanes max[2], grown[2], total[2], factor;
    Lanes shift[2];  // of all exponents, in units
    Powers::Offset offset[2];

    // bias: (kStrip), added to all logits; whole units.
    Softmax(const Strip& strip, float scale, const float* bias) : factor(to_all_lanes(scale * Powers::kUnit)) {
        for (int side = 0; side < 2; ++side) {
            shift[side] = whole_numbers(load_lanes(bias + side * kLanes) * factor);
            max[side] = load_lanes(strip.max + side * kLanes);
            total[side] = load_lanes(strip.total + side * kLanes);
        }
        set_offsets();
    }
    void store(const Strip& strip) const {
        for (int side = 0; side < 2; ++side) {
            store_lanes(strip.max + side * kLanes, max[side]);
            store_lanes(strip.total + side * kLanes, total[side]);
        }
    }
    // Lanes that have seen nothing yet have no maximum.
    void set_offsets() {
        for (int side = 0; side < 2; ++side)
            offset[side] = Powers::offset((max[side] == -kInfinity ? Lanes{} : max[side]) * Powers::kUnit - shift[side]);
    }

    // Whether logits of 32 tokens are too large for what weights are relative to; `grown` then is what they should be.
    bool outgrown(const float* logits) {
        Lanes top[2][2];
        for (int side = 0; side < 2; ++side) top[side][0] = top[side][1] = to_all_lanes(-kInfinity);
        for (int t = 0; t < kTokens; t += 2)
            for (int i = 0; i < 2; ++i)
                for (int side = 0; side < 2; ++side)
                    top[side][i] = larger(load_lanes(logits + (t + i) * kStrip + side * kLanes), top[side][i]);
        IntLanes grows[2];
        for (int side = 0; side < 2; ++side) {
            grown[side] = (larger(top[side][0], top[side][1]) * factor + shift[side]) / Powers::kUnit;
            grows[side] = grown[side] > max[side] + kSlack;
        }
        if (!any(grows[0] | grows[1])) return false;
        for (int side = 0; side < 2; ++side)
            for (int lane = 0; lane < kLanes; ++lane)
                grown[side][lane] = grows[side][lane] ? std::ceil(grown[side][lane]) : max[side][lane];
        return true;
    }
    void rescale(const Strip& strip, int num_channels) {
        for (int side = 0; side < 2; ++side) {
            // Whole powers of two, so that these are exponents; those of lanes that had no maximum are the smallest.
            const Lanes exponent = larger(max[side] - grown[side], to_all_lanes(-127)) + 127;
            const Lanes fall = (Lanes)(__builtin_convertvector(exponent, IntLanes) << 23);
            max[side] = grown[side];
            if (!any(total[side] != 0)) continue;  // nothing was added yet
            total[side] *= fall;
            for (int c = 0; c < num_channels; ++c) {
                float* at = strip.outputs + c * kStrip + side * kLanes;
                store_lanes(at, load_lanes(at) * fall);
            }
        }
        set_offsets();
    }

    // Weights of two tokens `pairs` times.
    void weigh(const Powers& powers, const float* logits, int pairs, BFloat* to) {
        if (Powers::is_far(offset[0]) || Powers::is_far(offset[1])) weigh<true>(powers, logits, pairs, to);
        else weigh<false>(powers, logits, pairs, to);
    }

  private:
    template <bool kFar>
    void weigh(const Powers& powers, const float* logits, int pairs, BFloat* to) {
        // Of its own, as nothing that is stored below can change them.
        Softmax now = *this;
        for (int pair = 0; pair < pairs; ++pair, logits += 2 * kStrip, to += 2 * kLanes) {
            for (int side = 0; side < 2; ++side) {
                const float* from = logits + side * kLanes;
                const Lanes first = load_lanes(from), second = load_lanes(from + kStrip);
                const BitLanes weights = powers.of<kFar>(first, second, now.factor, now.offset[side]);
                now.total[side] = add_pairs(now.total[side], weights);
                store_pairs(to + side * TokenTiles::kMax * kTileElements, weights);
            }
        }
        for (int side = 0; side < 2; ++side) total[side] = now.total[side];
    }
};

}  // namespace antkv
