// Sums over ranks: processes of one machine that have a part of each layer, and a piece of memory that all of them map.
//
// One primitive does everything: each rank writes what it has into a place of its own, waits until all have written, and
// reads what it needs. There are two places per rank, used in turn: who writes the next but one knows that all have read
// this one. All ranks call the same in the same order. Sums are taken in the order of the ranks, so that a row's result
// does not depend on how many rows there are.
#pragma once
#include <cstddef>

namespace quire {

struct Ranks;

// values[i] becomes its sum over all ranks; float32, or bfloat16 where an element has two bytes (added up in float32,
// rounded once). False if the ranks were told to give up.
bool all_reduce(Ranks* ranks, void* values, size_t count, size_t element_bytes);

}  // namespace quire
