// What products of tiles are made of.
#pragma once

#include "lanes.h"

namespace antkv {

constexpr int kTileRows = 16;   // rows of a tile, and columns of a product of two
constexpr int kTileDepth = 32;  // bfloat16 numbers in a row of a tile
constexpr int kTileElements = kTileRows * kTileDepth;

// One factor of a product: tiles along the inner dimension, `next` elements from one to the next. Those of rows 16 .. 32 of
// A, or of columns 16 .. 32 of B, stand `other` elements behind those of 0 .. 16.
struct Operand {
    const BFloat* tiles;
    int64_t next, other;
};

// Of products with few heads:
constexpr int kKeys = 32;    // tokens at a time
constexpr int kValues = 64;  // channels of values at a time

}  // namespace antkv
