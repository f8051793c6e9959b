// Log-probabilities of rows of float logits: log(softmax). Included inside a level's namespace; see level_*.cpp.
//
// NaN counts as minus infinity; a row of nothing else has minus infinity everywhere.

struct LogSum {
    float largest;
    double log;  // of the sum of exp(x - largest)
};

// One of the largest is left out of the sum, where it is 1: if it has nearly all of the mass, the rest would be lost in
// a sum with it.
INLINE LogSum log_sum(const float* x, size_t n) {
    const float largest = row_max(x, n);
    const F base = set1(largest), nan = set1(__builtin_nanf(""));
    double rest = -1;
    for (size_t block = 0; block < n; block += kBlock) {
        const size_t end = block + kBlock < n ? block + kBlock : n;
        F sums = zero();
        int ties = 0;
        for (size_t i = block; i < end; i += W) {
            const F v = load_or(x, i, n, nan);
            const Mask tie = greater_equal(v, base);
            ties += __builtin_popcount(bits(tie));
            sums = add(sums, select(tie, zero(), exp(sub(v, base))));
        }
        rest += sum_double(sums) + ties;
    }
    return {largest, __builtin_log1p(rest)};
}

INLINE float logprob(float x, LogSum sum) {
    if (!(x > -__builtin_inff())) return -__builtin_inff();
    return float((x == sum.largest ? 0. : double(x) - double(sum.largest)) - sum.log);
}

// The ids of the k largest, best first: those above the k-th largest value, and as many of the first that equal it.
INLINE void best_ids(const float* x, size_t n, size_t k, quire::Candidate* best) {
    const float lowest = kth_largest(x, n, k);
    const F bound = set1(lowest), nan = set1(__builtin_nanf(""));
    size_t found = 0;
    for (size_t i = 0; i < n; i += W)
        for (unsigned hits = bits(less(bound, load_or(x, i, n, nan))); hits; hits &= hits - 1) {
            const size_t id = i + size_t(__builtin_ctz(hits));
            best[found++] = {x[id], int32_t(id)};
        }
    const bool any = lowest == -__builtin_inff();  // NaN too, which compares to nothing
    for (size_t i = 0; i < n && found < k; i += W) {
        const F v = load_or(x, i, n, nan);
        unsigned hits = any ? bits(first(n - i < size_t(W) ? int(n - i) : W)) : bits(greater_equal(v, bound));
        for (hits &= ~bits(less(bound, v)); hits && found < k; hits &= hits - 1)
            best[found++] = {lowest, int32_t(i) + __builtin_ctz(hits)};
    }
    quire::sort_best_first(best, k);
}

INLINE void top_logprobs(const float* logits, size_t rows, size_t n, size_t k, float* values, int32_t* ids) {
    quire::parallel_ranges(rows, 1, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) {
            const float* x = logits + r * n;
            auto* best = (quire::Candidate*)quire::scratch(quire::kProbabilities, k * sizeof(quire::Candidate));
            const LogSum sum = log_sum(x, n);
            best_ids(x, n, k, best);
            for (size_t i = 0; i < k; ++i) {
                values[r * k + i] = logprob(best[i].logit, sum);
                ids[r * k + i] = best[i].id;
            }
        }
    });
}

INLINE int64_t logprobs_of(const float* logits, size_t rows, size_t n, const int64_t* ids, float* out) {
    for (size_t r = 0; r < rows; ++r)
        if (ids[r] < 0 || size_t(ids[r]) >= n) return 1 + int64_t(r);
    quire::parallel_ranges(rows, 1, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) {
            const float* x = logits + r * n;
            out[r] = logprob(x[ids[r]], log_sum(x, n));
        }
    });
    return 0;
}
