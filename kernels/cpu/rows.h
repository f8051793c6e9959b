// Operations that compute each row (token) independently: norms, embedding, rotary embedding with the cache write.
// Included inside a level's namespace; see level_*.cpp. Functions that return an int64_t return 0, or 1 + the index of
// the first invalid token.

constexpr int kMaxHeadDim = 512;

INLINE float inverse_rms(F squares, size_t n, float eps) {
    return 1.f / __builtin_sqrtf(sum(squares) / float(n) + eps);
}

// out = round(x / rms(x)) * weight, rounded as Hugging Face's LlamaRMSNorm.
INLINE void norm_row(const act* x, const act* weight, float eps, size_t n, act* out) {
    F squares = zero();
    size_t i = 0;
    for (; i + W <= n; i += W) squares = fma(act_load(x + i), act_load(x + i), squares);
    if (i < n) {
        const F v = act_load(x + i, int(n - i));
        squares = fma(v, v, squares);
    }
    const F scale = set1(inverse_rms(squares, n, eps));
    for (i = 0; i + W <= n; i += W)
        act_store(out + i, mul(act_round(mul(act_load(x + i), scale)), act_load(weight + i)));
    if (i < n) {
        const int left = int(n - i);
        act_store(out + i, mul(act_round(mul(act_load(x + i, left), scale)), act_load(weight + i, left)), left);
    }
}

INLINE void add_row(const act* x, act* residual, size_t n) {
    size_t i = 0;
    for (; i + W <= n; i += W) act_store(residual + i, add(act_load(residual + i), act_load(x + i)));
    if (i < n) {
        const int left = int(n - i);
        act_store(residual + i, add(act_load(residual + i, left), act_load(x + i, left)), left);
    }
}

// Computes the norm of x, or of the residual after residual += x if it is not null.
INLINE void rms_norm(const act* x, act* residual, const act* weight, float eps, size_t rows, size_t n, act* out) {
    quire::parallel_ranges(rows, 1 + (6 << 10) / n, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) {
            if (residual) add_row(x + r * n, residual + r * n, n);
            norm_row((residual ? residual : x) + r * n, weight, eps, n, out + r * n);
        }
    });
}

template <class Id>
INLINE int64_t embed(const Id* ids, size_t rows, const act* table, size_t vocab, size_t n, act* out) {
    for (size_t r = 0; r < rows; ++r)
        if (ids[r] < 0 || size_t(ids[r]) >= vocab) return 1 + int64_t(r);
    quire::parallel_ranges(rows, 1 + (64 << 10) / n, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) memcpy(out + r * n, table + size_t(ids[r]) * n, n * sizeof(act));
    });
    return 0;
}

// The layout of block_size * D cached values of one block and one kv head:
//   K: [block_size / G][D / kPerWord][G][kPerWord], G = min(16, block_size): the same word of G keys is contiguous, so
//      that one vector load reads a word of 16 keys;
//   V: [block_size / kPerWord][D][kPerWord]: for bf16, keys in pairs, so that one word holds two keys.
INLINE void write_key(act* block, size_t block_size, size_t offset, size_t d, const act* row) {
    const size_t group = block_size < 16 ? block_size : 16;
    uint32_t* to = (uint32_t*)block + offset / group * (d / kPerWord) * group + offset % group;
    const uint32_t* from = (const uint32_t*)row;
    for (size_t i = 0; i < d / kPerWord; ++i) to[i * group] = from[i];
}

INLINE void write_value(act* block, size_t offset, size_t d, const act* row) {
    act* to = block + offset / kPerWord * d * kPerWord + offset % kPerWord;
    if (kPerWord == 1) {
        memcpy(to, row, d * sizeof(act));
        return;
    }
    for (size_t i = 0; i < d; ++i) to[i * kPerWord] = row[i];
}

struct Rope {
    const act* qkv;  // [T, (H + 2 * H_kv) * D]
    const int32_t* positions;
    const float* cos_sin;  // [max_position, D]
    const void* slots;
    act *k_cache, *v_cache, *q;
    const act *q_norm, *k_norm;  // [D] or null
    size_t T, max_position, block_count, block_size, H, H_kv, D;
    float eps;
    int wide_slots;  // int64 rather than int32
};

INLINE void rotate_head(const act* x, const act* norm, float eps, const float* cos_sin, size_t d, act* out) {
    alignas(64) float v[kMaxHeadDim];
    const size_t half = d / 2;
    F squares = zero();
    for (size_t i = 0; i < d; i += W) {  // D is a multiple of 16
        const F a = act_load(x + i);
        squares = fma(a, a, squares);
        store(v + i, a);
    }
    if (norm) {
        const F scale = set1(inverse_rms(squares, d, eps));
        for (size_t i = 0; i < d; i += W)
            store(v + i, act_round(mul(act_round(mul(load(v + i), scale)), act_load(norm + i))));
    }
    for (size_t i = 0; i < half; i += W) {
        const int n = half - i < size_t(W) ? int(half - i) : W;
        const F c = load(cos_sin + i, n), s = load(cos_sin + half + i, n);
        const F a = load(v + i, n), b = load(v + half + i, n);
        act_store(out + i, sub(mul(a, c), mul(b, s)), n);
        act_store(out + half + i, add(mul(b, c), mul(a, s)), n);
    }
}

INLINE int64_t rope_and_cache(const Rope& job) {
    const auto slot = [&](size_t t) {
        return job.wide_slots ? ((const int64_t*)job.slots)[t] : int64_t(((const int32_t*)job.slots)[t]);
    };
    const int64_t slot_count = int64_t(job.block_count * job.block_size);
    for (size_t t = 0; t < job.T; ++t)
        if (slot(t) < -1 || slot(t) >= slot_count || job.positions[t] < 0 ||
            size_t(job.positions[t]) >= job.max_position)
            return 1 + int64_t(t);
    quire::parallel_ranges(job.T, 4, [&](size_t begin, size_t end) {
        const size_t d = job.D, heads = job.H + 2 * job.H_kv;
        alignas(64) act rotated[kMaxHeadDim];
        for (size_t t = begin; t < end; ++t) {
            const act* row = job.qkv + t * heads * d;
            const float* cos_sin = job.cos_sin + size_t(job.positions[t]) * d;
            for (size_t h = 0; h < job.H; ++h)
                rotate_head(row + h * d, job.q_norm, job.eps, cos_sin, d, job.q + (t * job.H + h) * d);
            if (slot(t) < 0) continue;
            const size_t block = size_t(slot(t)) / job.block_size, offset = size_t(slot(t)) % job.block_size;
            for (size_t h = 0; h < job.H_kv; ++h) {
                const size_t at = (block * job.H_kv + h) * job.block_size * d;
                rotate_head(row + (job.H + h) * d, job.k_norm, job.eps, cos_sin, d, rotated);
                write_key(job.k_cache + at, job.block_size, offset, d, rotated);
                write_value(job.v_cache + at, offset, d, row + (job.H + job.H_kv + h) * d);
            }
        }
    });
    return 0;
}
