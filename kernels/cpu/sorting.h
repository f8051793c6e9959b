// Sorting and selection with the algorithms of the standard library, compiled for the base instruction set. A level's
// file must not instantiate them: the linker keeps one copy of each instance, which could then hold instructions that
// the processor lacks.
#pragma once
#include <cstddef>
#include <cstdint>

#include "shared_symbols.h"

namespace quire {

struct Candidate {
    float logit;  // no NaN
    int32_t id;
};

// Returns the k-th largest value. Reorders the values. 1 <= k <= count; no NaN.
SHARED float kth_largest_of(float* values, size_t count, size_t k);

// Sorts values of at least zero.
SHARED void sort_descending(float* values, size_t count);

// Moves the k best candidates to the front, in order: by descending logit, of equal logits the lower id first.
SHARED void sort_best_first(Candidate* candidates, size_t count, size_t k);

}  // namespace quire
