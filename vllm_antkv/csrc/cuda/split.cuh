// What the warps of a CTA share while they decode, and what they have in registers.
//
// The producer warp fetches what the others attend to: a span of tokens at a time, through a ring in shared memory.
#pragma once

#include "tables.cuh"

constexpr int kTiles = 2;                    // of 16 tokens, per warp: halves the reads of the query
constexpr int kTokens = 16 * kTiles;         // a warp's: one per lane
constexpr int kSpan = kWarps * kTokens;      // tokens of all warps together
constexpr int kSpanPages = kSpan / kBlockSize;
constexpr int kTilesPerPage = kBlockSize / kTokens;
constexpr int kKeyColumns = 8 / Tables::kOrders;        // queries in the 8 columns of mma's B, for K
constexpr int kKeyGroups = (kGroup + kKeyColumns - 1) / kKeyColumns;
constexpr int kValueColumns = 8 / Tables::kSetColumns;  // and for V
constexpr int kValueGroups = (kGroup + kValueColumns - 1) / kValueColumns;
constexpr int kOwnSets = kSets / Tables::kSetColumns;   // sets of a part, neighbours, which are added up apart
constexpr int kExactGroups = (kGroup + 7) / 8;

// A lane's own queries: those whose logits mma leaves with it, in the columns that have the order of its rows. Of four
// orders only half of the lanes have such columns; so in every second group orders are turned by two, for the other half.
constexpr int kOwnQueries = Tables::kOrders == 1 ? 2 * kKeyGroups : (kGroup + 3) / 4;
ANTKV_DEVICE constexpr bool is_turned(int group) { return Tables::kOrders == 4 && group % 2; }
ANTKV_DEVICE int own_group(Lane lane, int own) {
    if constexpr (Tables::kOrders == 1) return own / 2;
    if constexpr (Tables::kOrders == 2) return own;
    return own * 2 + (lane.column + lane.row / 2) % 2;
}
ANTKV_DEVICE int own_column(Lane lane, int own) {
    return lane.column * 2 + (Tables::kOrders == 1 ? own : lane.row) % 2;
}
// Beyond the group where it fills no product.
ANTKV_DEVICE int own_query(Lane lane, int own) {
    return own_group(lane, own) * kKeyColumns + own_column(lane, own) / Tables::kOrders;
}
// The lane of row 0 that has a query, and which of its own it is.
ANTKV_DEVICE int owner_of(int q) {
    if constexpr (Tables::kOrders == 1) return q % 8 / 2;
    return Tables::kOrders == 2 ? q % 4 : q % 2 * 2 + q / 2 % 2;
}
ANTKV_DEVICE constexpr int own_of(int q) { return Tables::kOrders == 1 ? q / 8 * 2 + q % 2 : q / 4; }
// Lanes with the same queries are 8: in three steps, with the lane that differs in these bits, all of them meet.
ANTKV_DEVICE constexpr int peer(int step) { return step == 1 ? Tables::kOrders == 4 ? 9 : 8 : 4 << step; }

// Of a token in a query's row of logits or weights. The four tokens of a lane lie side by side, for what it computes and for
// what it multiplies with V; lanes that write together, of other queries, do so in other banks.
ANTKV_DEVICE int place_of(u32 q, u32 token) { return (int)((token % 8 ^ q * 2 % 8) * 4 + token / 8); }
// Of a rotated query's row, one of which nobody reads: queries that lanes read together lie in other banks.
constexpr int kQueryQuads = kQuads + 1;
constexpr float kLog2E = 1.4426950408889634f;
// The maximum that weights are relative to moves when a logit passes it by this much: 2^8 fits float16, and it is rare.
constexpr float kSlack = 8.0f;
static_assert(kSpan % kBlockSize == 0, "spans are whole pages");

// Behind the warps that attend comes the producer.
constexpr int kDecodeThreads = kThreads + kWarp;
constexpr int kRing = ANTKV_RING;   // spans
constexpr bool kBulk = ANTKV_BULK;  // there are bulk copies: compute capability 9.0
// The attending warps' own meeting.
ANTKV_DEVICE void sync_attending() { sync_threads<kThreads>(1); }

// Codes of K, codes of V, and the anchors behind them where there is room for as many as the layer has.
constexpr bool kStagesAnchors = ANTKV_STAGED_ANCHORS > 0;
static_assert(ANTKV_STAGED_ROWS <= 8, "anchor rows in a span are looked at once, and are one product's");
constexpr int kCodeSection = kBlockSize * kCodeBytes;
constexpr int kPageBytes = 2 * kCodeSection + ANTKV_STAGED_ANCHORS;

// A span is of a split. What every tile asks first comes first: one read.
struct alignas(16) SplitDesc {
    i32 token, end;       // the first token, or kNoMore; where the split ends
    i32 position;         // of the query
    i32 is_last;          // of the split
    i32 query_row, request;  // row of the query in the step's tensors, whose it is
    i32 item, num_splits; // the split's number in `Results`; of the query
};
constexpr int kNoMore = -1;

struct Span {
    alignas(16) u8 pages[kSpanPages][kPageBytes];
    alignas(16) u16 raw[kGroup][kHeadSize];  // the queries as they are
    u16 plain[kGroup][kHeadSize];            // the same, scaled for base-2 exponentials, float16
    union {
        uint2 query[kTiles][kGroup][kQueryQuads];  // `plain` rotated back, in the order of codes
        float voting[kGroup][kBlockSize];  // of a split's last span, when all have attended: logits of the query's block
    };
    SplitDesc desc;
    const u8* pages_at[kSpanPages];          // in global memory
    float bias[kGroup];                      // see `Plain::bias`
    u32 exact[kWarps];                       // tokens of each warp that the query sees in full precision
};

struct Weighing {
    // Tokens at `place_of`.
    float logits[kWarps][kGroup][kTokens];
    u16 weights[kWarps][2][kGroup][kTokens];  // [coded, exact]
};
struct Merging {
    float output[kWarps][kValueColumns][kHeadSize];
};

// Shared memory behind the tables.
struct Shared {
    Span ring[kRing];
    alignas(16) u8 scratch[larger(sizeof(Weighing), sizeof(Merging))];
    float2 statistics[kWarps][kGroup];  // maximum and sum of each warp
    Barrier full[kRing], empty[kRing];

    ANTKV_DEVICE float (*logits(int warp))[kTokens] { return ((Weighing*)scratch)->logits[warp]; }
    ANTKV_DEVICE u16 (*weights(int warp))[kGroup][kTokens] { return ((Weighing*)scratch)->weights[warp]; }
};

static_assert(Tables::kBytes + sizeof(Shared) == ANTKV_DECODE_SHARED, "vllm_antkv/ops/cuda_build.py counts otherwise");

struct Rotation {
    u32 cosine[2][kPairs][2], sine[2][kPairs][2];  // [row of a half, 8 apart], float16 pairs of channels
};

// What a lane has of a tile's logits: of its own queries, tokens `row`, `row` + 8, `row` + 16 and `row` + 24.
struct Logits {
    float of[kOwnQueries][4];
};

// What a warp has added up.
struct Sums {
    float output[kOwnSets][kValueGroups][2][4];
    float maximum[kOwnQueries], total[kOwnQueries];  // `total` is of the lane's own tokens
};

// What decoding is handed.
struct Inputs {
    const Layer& layer;
    const Step& step;
    const Rows query, key, value;
    const Results& results;
    const int head;
};

// A warp's 32 tokens of a span.
struct Tile {
    const Inputs& in;
    Shared& shared;
    const Span& span;
    const Tables& tables;
    const Lane lane;
    const int warp;
    const int token, end, position;  // the first token; as in `SplitDesc`
    const bool is_last;               // of the split's spans

    // Of K; those of V are `kCodeSection` behind.
    ANTKV_DEVICE const u8* codes() const {
        return span.pages[warp / kTilesPerPage] + warp % kTilesPerPage * kTokens * kCodeBytes;
    }
    ANTKV_DEVICE float (*logits() const)[kTokens] { return shared.logits(warp); }
    ANTKV_DEVICE u16 (*weights(int kind) const)[kTokens] { return shared.weights(warp)[kind]; }
};

// Cosines and sines of the offsets of the lane's rows in the first half of a tile. The other half's are the same, since it
// has a query of its own, rotated back by 16 positions more: so they fit in registers. The scales of the tables, which
// the channels of a rotary pair share, ride on them.
ANTKV_DEVICE Rotation lane_rotation(const Layer& layer, int head, Lane lane, int warp) {
    Rotation rotation;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
        const int offset = warp * kTokens + row * 8 + lane.row;
        const i64 angles = (i64)(offset < layer.rotary_rows ? offset : 0) * (kHeadSize / 2);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
            const int first = Tables::key_quad(lane.column, lane.row % Tables::kOrders, j, false);
            const int quad = first % (kQuads / 2);
            const float scale = Tables::key_scale(layer, head, quad), sign = first == quad ? 1 : -1;
            for (int half = 0; half < 2; ++half) {
                const i64 at = angles + quad * 4 + half * 2;
                const float *cos = layer.cos + at, *sin = layer.sin + at;
                rotation.cosine[row][j][half] =
                    layer.cos ? pack_f16(cos[0] * scale, cos[1] * scale) : pack_f16(scale, scale);
                rotation.sine[row][j][half] =
                    layer.cos ? pack_f16(sign * scale * sin[0], sign * scale * sin[1]) : pack_f16(0, 0);
            }
        }
    }
    return rotation;
}
