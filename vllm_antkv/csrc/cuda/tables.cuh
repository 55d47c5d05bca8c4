// Where a code becomes channels: in one of two kinds of tables, which decide how lanes share the channels of a row.
#pragma once

#include "cached_tables.cuh"
#include "staged_tables.cuh"

// A kind of tables has
//   kBytes                    bytes of shared memory; the constructor, which all threads call together, fills them
//   kAtOnce                   quads that a load brings, of pairs `j ...` of K or of sets `turn ...` of V
//   kOrders                   orders in which rows of K take their pairs: mma's B has a column per (query, order)
//   kSetColumns               parts of the sets of V: mma's B has a column per (query, part); lanes may read sets of any
//   key_quad(column, order, j, second)    quad of K that a lane has first (or second, its rotary partner) in pair `j`
//   query_offset(lane, j, second, turned) bytes to the channels of a query that the lane's column of B needs then; `turned`:
//                                         its order is two further
//   value_set(column, turn), value_quad(row, set)    the set that a lane reads in its turn, the quad of V that it is
//   key_scale(layer, head, quad)          of what load_keys brings; partners share it
//   value_scale(layer, head), value_unit  of what load_values brings, and of the sums of V with it; its inverse
//   fetch_key(row), fetch_value(row)      of a token's row of codes, what the loads take: codes, or what they stand for
//   load_keys(fetched, j, second), load_values(fetched, turn)
//   key_operand(load, i), value_operand(loads, i, a)    quad `i` of a load; of the loads of four tokens, transposed
template <int>
struct TablesOf;
template <>
struct TablesOf<256> {
    using Kind = StagedTables;
};
template <>
struct TablesOf<4096> {
    using Kind = CachedTables;
};
using Tables = TablesOf<kCentroids>::Kind;
