// argmax and sampling over rows of float logits. Included inside a level's namespace; see level_*.cpp.
//
// NaN counts as minus infinity. A row of minus infinity gives token 0.

constexpr size_t kBlock = 256;       // probabilities of a block, whose sum is kept so that a draw scans one block only
constexpr size_t kFewEnough = 2048;  // probabilities that are few enough to sort
constexpr int kCuts = 8;             // thresholds that divide a range of probabilities

INLINE F load_or(const float* x, size_t i, size_t n, F other) {
    if (i + W <= n) return load(x + i);
    const int left = int(n - i);
    return select(first(left), load(x + i, left), other);
}

INLINE float row_max(const float* x, size_t n) {
    const F lowest = set1(-__builtin_inff());
    F a = lowest, b = lowest;
    for (size_t i = 0; i < n; i += 2 * W) {
        a = max(load_or(x, i, n, lowest), a);
        if (i + W < n) b = max(load_or(x, i + W, n, lowest), b);
    }
    return max_of(max(a, b));
}

INLINE int32_t argmax_row(const float* x, size_t n) {
    const float largest = row_max(x, n);
    const F nan = set1(__builtin_nanf("")), wanted = set1(largest);
    for (size_t i = 0; i < n; i += W)
        if (const unsigned hit = bits(greater_equal(load_or(x, i, n, nan), wanted)))
            return int32_t(i) + __builtin_ctz(hit);
    return 0;
}

// Returns a lower bound of the k-th largest value that few values reach: the k-th largest of many partial maxima.
INLINE float kth_largest_bound(const float* x, size_t n, size_t k) {
    const F lowest = set1(-__builtin_inff());
    const size_t vectors = (n + W - 1) / W;
    size_t parts = (4 * k + W - 1) / W;
    if (parts < 16) parts = 16;
    if (parts > vectors) parts = vectors;
    if (k >= parts * W) return -__builtin_inff();
    float* found = (float*)quire::scratch(quire::kCandidates, parts * W * sizeof(float));
    for (size_t p = 0; p < parts; ++p) {
        F largest = lowest;
        for (size_t v = vectors * p / parts; v < vectors * (p + 1) / parts; ++v)
            largest = max(load_or(x, v * W, n, lowest), largest);
        store(found + p * W, largest);
    }
    return quire::kth_largest_of(found, parts * W, k);
}

INLINE float kth_largest(const float* x, size_t n, size_t k) {
    const float bound = kth_largest_bound(x, n, k);
    float* found = (float*)quire::scratch(quire::kCandidates, (n + 2 * W) * sizeof(float));
    const F nan = set1(__builtin_nanf(""));
    size_t count = 0;
    for (size_t i = 0; i < n; i += W) {
        const F v = load_or(x, i, n, nan);
        const Mask m = greater_equal(v, set1(bound));
        if (bits(m)) count += compress(found + count, v, m);
    }
    return count < k ? -__builtin_inff() : quire::kth_largest_of(found, count, k);
}

// The sum and the number of some probabilities.
struct Mass {
    double sum;
    size_t count;
};

// Returns the mass of the probabilities that are at least `cut`. p has whole blocks. A lower cut has no smaller sum,
// because the values are added in the same order and rounding keeps the order of sums.
INLINE Mass mass_from(const float* p, size_t blocks, float cut) {
    double mass = 0;
    I count = int_zero();
    const F bound = set1(cut);
    for (size_t b = 0; b < blocks; ++b, p += kBlock) {
        F sums = zero();
#pragma GCC unroll 4
        for (size_t i = 0; i < kBlock; i += W) {
            const F v = load(p + i);
            const Mask m = greater_equal(v, bound);
            sums = add(sums, keep(m, v));
            count = add_ones(count, m);
        }
        mass += sum_double(sums);
    }
    return {mass, size_t(int_sum(count))};
}

// Copies the probabilities in [low, high) to `out`, which has room for W more, and returns their number.
INLINE size_t between_cuts(const float* p, size_t blocks, float low, float high, float* out) {
    size_t n = 0;
    for (size_t i = 0; i < blocks * kBlock; i += W) {
        const F v = load(p + i);
        const Mask m = both(greater_equal(v, set1(low)), less(v, set1(high)));
        if (bits(m)) n += compress(out + n, v, m);
    }
    return n;
}

// Returns the largest t for which the probabilities >= t have a mass of at least `target`. The largest probability is
// 1. count: of the probabilities above zero.
INLINE float nucleus(const float* p, size_t blocks, size_t count, double target) {
    constexpr float kLeast = 1e-45f;   // the smallest float above zero
    float low = kLeast, high = 2.f;    // mass(>= low) reaches the target, mass(>= high) does not
    double above = 0, left_out = 0;    // mass(>= high); the part of it that `p` lacks
    size_t inside = count, below_high = 0, count_left_out = 0;
    float* memory = (float*)quire::scratch(quire::kCandidates, 2 * (blocks * kBlock + kBlock) * sizeof(float));
    float* sorted = memory + blocks * kBlock + kBlock;
    bool is_compact = false;
    float cuts[kCuts];
    for (int pass = 0; inside > kFewEnough; ++pass) {
        if (low > kLeast && __builtin_nextafterf(low, high) >= high) return low;
        for (int c = 0; c < kCuts; ++c)
            if (pass == 0)
                cuts[c] = 1.f / float(1u << (2 * c));  // 1, 1/4, ... 1/16384
            else if (low == kLeast)
                cuts[c] = high / float(16u << (3 * c));
            else
                cuts[c] = high - (high - low) * (float(c + 1) / kCuts);
        if (pass > 0 && low > kLeast) cuts[kCuts - 1] = low;
        float new_low = low;
        size_t low_count = low == kLeast ? count : inside + below_high;
        for (int first = 0, end = kCuts; first < end;) {  // the first cut that reaches the target, by bisection
            const int c = (first + end) / 2;
            const Mass found = mass_from(p, blocks, cuts[c]);
            if (found.sum + left_out >= target) {
                end = c, new_low = cuts[c], low_count = found.count + count_left_out;
            } else {
                first = c + 1;
                if (cuts[c] < high) high = cuts[c], above = found.sum + left_out, below_high = found.count + count_left_out;
            }
        }
        low = new_low;
        inside = low_count - below_high;
        if (low == kLeast && high < 1e-37f) return 0.f;
        // From here on, only these probabilities matter: later passes read them alone.
        if (!is_compact && inside * 4 < blocks * kBlock) {
            const size_t n = between_cuts(p, blocks, low, high, memory);
            blocks = (n + kBlock - 1) / kBlock;
            for (size_t i = n; i < blocks * kBlock; ++i) memory[i] = 0.f;
            p = memory, is_compact = true, left_out = above, count_left_out = below_high;
        }
    }
    const size_t n = between_cuts(p, blocks, low, high, sorted);
    quire::sort_descending(sorted, n);
    for (size_t i = 0; i < n; ++i) {
        above += sorted[i];
        if (above >= target) return sorted[i];
    }
    return low;
}

// Computes, for each block, the sum of the probabilities that are at least `lowest`. Returns the total.
INLINE double sum_blocks(const float* p, size_t blocks, float lowest, double* sums) {
    double total = 0;
    for (size_t b = 0; b < blocks; ++b) {
        F s = zero();
        for (size_t i = 0; i < kBlock; i += W) {
            const F v = load(p + b * kBlock + i);
            s = add(s, keep(greater_equal(v, set1(lowest)), v));
        }
        sums[b] = sum_double(s);
        total += sums[b];
    }
    return total;
}

// Computes the probabilities over the largest, whose logit is `largest`, and their sum for each block. Logits below
// lowest_logit get 0. kCounts: also counts the probabilities above zero. Returns the total.
template <bool kCounts>
INLINE double probabilities(const float* x, size_t n, float largest, float lowest_logit, float inverse_temperature,
                            float* p, double* sums, size_t* count) {
    const F base = set1(largest), inverse = set1(inverse_temperature), nan = set1(__builtin_nanf(""));
    double total = 0;
    I above_zero = int_zero();
    for (size_t b = 0; b * kBlock < n; ++b) {
        F s = zero();
        for (size_t i = b * kBlock; i < (b + 1) * kBlock; i += W) {
            F v = i < n ? load_or(x, i, n, nan) : nan;
            const Mask kept = greater_equal(v, set1(lowest_logit));
            v = select(greater_equal(v, base), set1(1.f), exp(mul(sub(v, base), inverse)));
            v = keep(kept, v);
            store(p + i, v);
            s = add(s, v);
            if (kCounts) above_zero = add_ones(above_zero, less(zero(), v));
        }
        sums[b] = sum_double(s);
        total += sums[b];
    }
    if (kCounts) *count = size_t(int_sum(above_zero));
    return total;
}

struct Sampling {
    const float* logits;  // [R, V]
    size_t R, V;
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    const double* uniform;
    int32_t* out;
};

INLINE int32_t sample_row(const Sampling& job, size_t row) {
    const float* x = job.logits + row * job.V;
    const size_t n = job.V, blocks = (n + kBlock - 1) / kBlock, k = size_t(job.top_k[row] > 0 ? job.top_k[row] : 0);
    const float largest = row_max(x, n);
    if (largest == -__builtin_inff()) return 0;
    const float lowest_logit = k > 0 && k < n ? kth_largest(x, n, k) : -__builtin_inff();

    double* sums = (double*)quire::scratch(quire::kProbabilities, blocks * sizeof(double) + blocks * kBlock * 4);
    float* p = (float*)(sums + blocks);
    const float inverse = 1.f / job.temperature[row];
    double total = 0;
    size_t count = 0;
    if (job.top_p[row] < 1.f)
        total = probabilities<true>(x, n, largest, lowest_logit, inverse, p, sums, &count);
    else
        total = probabilities<false>(x, n, largest, lowest_logit, inverse, p, sums, &count);
    float lowest = 0.f;
    if (job.top_p[row] < 1.f) lowest = nucleus(p, blocks, count, double(job.top_p[row]) * total);
    if (job.min_p[row] > lowest) lowest = job.min_p[row];
    if (lowest > 1.f) lowest = 1.f;
    if (lowest > 0.f) total = sum_blocks(p, blocks, lowest, sums);

    const double target = job.uniform[row] * total;
    double passed = 0;
    size_t last = 0;
    for (size_t b = 0; b < blocks; ++b) {
        if (passed + sums[b] <= target && b + 1 < blocks) {
            passed += sums[b];
            if (sums[b] > 0) last = b;
            continue;
        }
        if (sums[b] > 0) last = b;
        double at = passed;
        size_t seen = n;
        for (size_t i = last * kBlock; i < (last + 1) * kBlock && i < n; ++i) {
            if (p[i] <= 0.f || p[i] < lowest) continue;
            seen = i;
            at += p[i];
            if (b == last && at > target) break;
        }
        return int32_t(seen < n ? seen : 0);
    }
    return 0;
}

INLINE void argmax(const float* logits, size_t rows, size_t n, int32_t* out) {
    quire::parallel_ranges(rows, 1, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) out[r] = argmax_row(logits + r * n, n);
    });
}

INLINE void sample(const Sampling& job) {
    quire::parallel_ranges(job.R, 1, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) job.out[r] = sample_row(job, r);
    });
}
