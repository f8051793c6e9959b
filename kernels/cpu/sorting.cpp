#include "sorting.h"

#include <algorithm>
#include <functional>

namespace quire {

float kth_largest_of(float* values, size_t count, size_t k) {
    std::nth_element(values, values + (k - 1), values + count, std::greater<float>());
    return values[k - 1];
}

void sort_descending(float* values, size_t count) { std::sort(values, values + count, std::greater<float>()); }

void sort_best_first(Candidate* candidates, size_t count, size_t k) {
    const auto better = [](const Candidate& a, const Candidate& b) {
        return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    std::partial_sort(candidates, candidates + k, candidates + count, better);
}

}  // namespace quire
