// Collective operations of ranks: processes of one machine that hold a part of each layer each, and share memory.
//
// All operations use one primitive: each rank writes its values into its place, waits until all ranks have written, and
// reads what it needs. A rank has two places, for alternate turns: when a rank writes to a place again, two turns
// later, all ranks have read it. All ranks call the same operations in the same order. Sums are taken in the order of
// the ranks, so that the result of a row does not depend on the number of rows.
#pragma once
#include <cstddef>

#include "shared_symbols.h"

namespace quire {

struct Ranks;

// Replaces values[i] by its sum over all ranks. element_bytes: 4 for float32, 2 for bfloat16. Values of bfloat16 are
// summed in float32 and rounded once. Returns false if a rank has given up.
SHARED bool all_reduce(Ranks* ranks, void* values, size_t count, size_t element_bytes);

}  // namespace quire
