// Log-probabilities, log(softmax), of rows of float logits. Included inside a level's namespace; see level_*.cpp.
//
// NaN counts as minus infinity. In a row without other logits, all log-probabilities are minus infinity.

struct LogSum {
    float largest;
    double log;  // of the sum of exp(x - largest); minus infinity for a row of NaN
};

// The sum leaves out one of the largest logits, whose term is 1, and log1p adds it: if that logit has nearly all of the
// mass, a sum with it would lose the rest.
INLINE LogSum log_sum(const float* x, size_t n, float largest) {
    const F base = set1(largest), nan = set1(__builtin_nanf(""));
    double rest = 0;
    size_t ties = 0;
    for (size_t block = 0; block < n; block += kBlock) {
        const size_t end = block + kBlock < n ? block + kBlock : n;
        F sums = zero();
        for (size_t i = block; i < end; i += W) {
            const F v = load_or(x, i, n, nan);
            const Mask tie = greater_equal(v, base);
            ties += size_t(__builtin_popcount(bits(tie)));
            sums = add(sums, select(tie, zero(), exp(sub(v, base))));
        }
        rest += sum_double(sums);
    }
    return {largest, __builtin_log1p(rest + (double(ties) - 1))};
}

INLINE float logprob(float x, LogSum sum) {
    if (!(x > -__builtin_inff())) return -__builtin_inff();
    return float((x == sum.largest ? 0. : double(x) - double(sum.largest)) - sum.log);
}

// Returns candidates in a buffer of the thread. The first k of them are the k best, in order.
INLINE const quire::Candidate* best_of_row(const float* x, size_t n, size_t k) {
    auto* found = (quire::Candidate*)quire::scratch(quire::kProbabilities, n * sizeof(quire::Candidate));
    const float bound = kth_largest_bound(x, n, k);
    size_t count = 0;
    if (bound == -__builtin_inff()) {  // all are candidates; NaN counts as minus infinity
        for (; count < n; ++count) found[count] = {x[count] > bound ? x[count] : bound, int32_t(count)};
    } else {
        const F nan = set1(__builtin_nanf(""));
        for (size_t i = 0; i < n; i += W)
            for (unsigned hits = bits(greater_equal(load_or(x, i, n, nan), set1(bound))); hits; hits &= hits - 1) {
                const size_t id = i + size_t(__builtin_ctz(hits));
                found[count++] = {x[id], int32_t(id)};
            }
    }
    quire::sort_best_first(found, count, k);
    return found;
}

INLINE void top_logprobs(const float* logits, size_t rows, size_t n, size_t k, float* values, int32_t* ids) {
    quire::parallel_ranges(rows, 1, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) {
            const float* x = logits + r * n;
            const quire::Candidate* best = best_of_row(x, n, k);
            const LogSum sum = log_sum(x, n, best[0].logit);
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
            out[r] = logprob(x[ids[r]], log_sum(x, n, row_max(x, n)));
        }
    });
    return 0;
}
