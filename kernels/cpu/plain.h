// Helpers compiled for the base instruction set. Library templates must not be instantiated in a level's file: the
// linker keeps one copy of each, which could then hold instructions that the processor lacks.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

struct Candidate {
    float logit;  // no NaN
    int32_t id;
};

float kth_largest_of(float* values, size_t count, size_t k);  // reorders; 1 <= k <= count; no NaN
void sort_descending(float* values, size_t count);
void sort_best_first(Candidate* candidates, size_t count, size_t k);  // the first k; of equals the lower id first

}  // namespace quire
