// Operations that compute each row (token) independently: norms, rotary embedding with the cache write.
// Included inside a level's namespace; see level_*.cpp. Functions that return an int64_t return 0, or 1 + the index of
// the first invalid token.

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

// Adds the rows of x [rows, n] to those of the residual.
INLINE void add_rows(const act* x, act* residual, size_t rows, size_t n) {
    quire::parallel_ranges(rows, 1 + (6 << 10) / n, [&](size_t begin, size_t end) {
        add_row(x + begin * n, residual + begin * n, (end - begin) * n);
    });
}

// x [rows, n] *= scale.
INLINE void scale_rows(act* x, float scale, size_t rows, size_t n) {
    quire::parallel_ranges(rows, 1 + (6 << 10) / n, [&](size_t begin, size_t end) {
        const F factor = set1(scale);
        for (size_t i = begin * n; i < end * n; i += W) {
            const int left = end * n - i < size_t(W) ? int(end * n - i) : W;
            act_store(x + i, mul(act_load(x + i, left), factor), left);
        }
    });
}

// gate [rows, n] = gelu(gate) * input, with gelu(gate) rounded. The input of row r is at input + row_of(r) * stride.
template <class RowOf>
INLINE void gelu_mul_rows(act* gate, const act* input, size_t stride, size_t rows, size_t n, const RowOf& row_of) {
    quire::parallel_ranges(rows, 1 + (2 << 10) / n, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r)
            for (size_t i = 0; i < n; i += W) {
                const int left = n - i < size_t(W) ? int(n - i) : W;
                act* at = gate + r * n + i;
                const F own = act_load(input + row_of(r) * stride + i, left);
                act_store(at, mul(act_round(gelu_tanh(act_load(at, left))), own), left);
            }
    });
}

// The weights of a norm, which some rows have of their own.
struct RowNorm {
    const act* weight;  // of all other rows; or null, without a norm
    // Of each adapter or null: the weights of its norms, where null stands for those of `weight`.
    const act* const* const* own = nullptr;
    const int32_t* index = nullptr;  // of each row: its adapter, or -1
    size_t at = 0;                   // of this norm in `own`

    const act* of(size_t row) const {
        if (!own || index[row] < 0 || !own[index[row]]) return weight;
        const act* const found = own[index[row]][at];
        return found ? found : weight;
    }
};

// Computes the norm of x, or of the residual after residual += x if it is not null.
INLINE void rms_norm(const act* x, act* residual, const RowNorm& norm, float eps, size_t rows, size_t n, act* out) {
    quire::parallel_ranges(rows, 1 + (6 << 10) / n, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) {
            if (residual) add_row(x + r * n, residual + r * n, n);
            norm_row((residual ? residual : x) + r * n, norm.of(r), eps, n, out + r * n);
        }
    });
}

struct Rope {
    const act* qkv;  // [T, (H + 2 * H_kv) * D]
    const int32_t* positions;
    const float* cos_sin;  // [max_position, D]
    const void* slots;
    char *k_cache, *v_cache;
    act* q;
    RowNorm q_norm, k_norm;  // [D]
    const act* v_norm;       // [D] or null
    size_t T, max_position, block_count, block_size, H, H_kv, D;
    float eps;
    int wide_slots;  // int64 rather than int32
    KvType kv_type;
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
        const KvLayout layout{job.kv_type, d, job.block_size};
        alignas(64) act rotated[kMaxHeadDim];
        for (size_t t = begin; t < end; ++t) {
            const act* row = job.qkv + t * heads * d;
            const float* cos_sin = job.cos_sin + size_t(job.positions[t]) * d;
            for (size_t h = 0; h < job.H; ++h)
                rotate_head(row + h * d, job.q_norm.of(t), job.eps, cos_sin, d, job.q + (t * job.H + h) * d);
            if (slot(t) < 0) continue;
            const size_t block = size_t(slot(t)) / job.block_size, offset = size_t(slot(t)) % job.block_size;
            for (size_t h = 0; h < job.H_kv; ++h) {
                const size_t at = (block * job.H_kv + h) * layout.head_bytes();
                rotate_head(row + (job.H + h) * d, job.k_norm.of(t), job.eps, cos_sin, d, rotated);
                write_row(layout, true, job.k_cache + at, offset, rotated);
                const act* value = row + (job.H + job.H_kv + h) * d;
                if (job.v_norm) {
                    norm_row(value, job.v_norm, job.eps, d, rotated);
                    value = rotated;
                }
                write_row(layout, false, job.v_cache + at, offset, value);
            }
        }
    });
    return 0;
}
