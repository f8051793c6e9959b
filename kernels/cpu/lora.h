// Low-rank adapters (LoRA) of linear layers: y += scale * (x A^T) B^T for the rows of a batch that use an adapter, and
// then y = y * gain + shift for parts with gains. Included inside a level's namespace; see level_*.cpp.
//
// Each sum is one chain in order, over the inputs for A and over the ranks for B. So a row's bits do not depend on the
// other rows, on their adapters or on the number of threads.

constexpr int kMaxRank = 512;    // `MAX_RANK` in kernels/lora.py
constexpr int kAdapterRows = 4;  // rows of a unit, `UNIT_ROWS` in lora.py

// The factors of some columns of a linear layer. `_Part` in lora.py has the same fields in the same order.
struct AdapterPart {
    const void* a;  // [ceil(rank / 4)][lines of inputs][4 rows][64 bytes of inputs], padded with zeros
    const void* b;  // [ceil(width / 16)][rank][16 columns] of float32, [..][ceil(rank / 2)][16 columns][2] of bfloat16
    int64_t rank, width, format;  // format: kWords (float32) or kBfloat16
    int64_t offset, stride;       // the column of chunk i of 16 columns is offset + i * stride
    double scale;
    const float *gains, *shifts;  // [chunks of 16 columns][16] of each column; or null, for gains 1 and shifts 0
};

// All factors of one linear layer in one adapter. `_Linear` in lora.py.
struct AdapterLinear {
    const AdapterPart* parts;
    int64_t count;
};

// Rows grouped by adapter. Unit u has the rows rows[starts[u]] .. rows[starts[u + 1] - 1], at most kAdapterRows, which
// use the adapter adapters[u]. `_Rows` in lora.py.
struct AdapterRows {
    const int32_t *rows, *starts, *adapters;
    int64_t units;
    const int32_t* index;  // of each row: its adapter, or -1
};

// The factors of an adapter are one stream in the order of their use. Each line that is read prefetches the one this many
// bytes after it; at the end of a linear layer, that is the beginning of the next one.
constexpr size_t kAdapterAhead = 4 << 10;
constexpr int kRankGroup = 4;      // rows of A that are stored together, `_RANKS` in lora.py
constexpr size_t kFactorLine = 64;  // bytes of a row of A that are stored together

enum AdaptedLinear { kAdaptQkv, kAdaptO, kAdaptGateUp, kAdaptDown, kAdaptedLinears };
enum AdaptedEnd { kAdaptEmbedding, kAdaptHead };  // `ENDS` in kernels/lora.py

// `OWN_NORMS` in kernels/lora.py.
enum OwnNorm { kInputNorm, kMlpNorm, kQNorm, kKNorm, kPostAttentionNorm, kPostMlpNorm, kOwnNorms };

// The adapters of a step. `_Adapters` in lora.py.
struct Adapters {
    const AdapterLinear* const* adapters;  // of each: [layers][kAdaptedLinears], or the two of AdaptedEnd
    AdapterRows tokens, wanted;            // of all tokens, and of the tokens whose output is wanted
    const act* const* const* norms;        // of each or null: [layers + 1][kOwnNorms]; null if none has norms
};

template <int kFormat>
INLINE F factor(const char* p) {
    return kFormat == kBfloat16 ? load_bfloat16((const uint16_t*)p) : load((const float*)p);
}

// The factors that a unit reads, up to `end`. `jump` leads from there to those that its thread reads next.
struct FactorStream {
    const char* end;
    ptrdiff_t jump;

    void fetch(const char* p) const {
        p += kAdapterAhead;
        _mm_prefetch(p < end ? p : p + jump, _MM_HINT_T1);
    }
};

// Adds the products of the inputs of one line with kRankGroup rows of A, for kRows rows. a: the lines of these rows of A.
// x: of each row, the first of `count` inputs.
template <int kFormat, int kRows, bool kWhole>
INLINE void reduce_line(const char* a, const FactorStream& stream, const act* const* x, size_t at, int count,
                        F (&sums)[kRankGroup][kRows]) {
    constexpr int kInputs = int(kFactorLine / (kFormat == kBfloat16 ? 2 : 4));
#pragma GCC unroll 4
    for (int r = 0; r < kRankGroup; ++r) stream.fetch(a + r * kFactorLine);
#ifdef ACT_BF16
    if constexpr (kFormat == kBfloat16) {  // pairs of inputs
        Word v[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
            if (kWhole) {
                v[row] = word_load((const uint32_t*)(x[row] + at));
            } else {
                uint32_t line[kFactorLine / 4];
                copy_line(line, x[row] + at, count);
                v[row] = word_load(line);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRankGroup; ++r) {
            const Word one = word_load((const uint32_t*)(a + r * kFactorLine));
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) sums[r][row] = dot(sums[r][row], one, v[row]);
        }
        return;
    }
#endif
#pragma GCC unroll 2
    for (int half = 0; half < kInputs / W; ++half) {
        F v[kRows];
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row)
            v[row] = kWhole ? act_load(x[row] + at + half * W) : act_load(x[row] + at + half * W, count - half * W);
#pragma GCC unroll 4
        for (int r = 0; r < kRankGroup; ++r) {
            const F one = factor<kFormat>(a + r * kFactorLine + half * W * (kFormat == kBfloat16 ? 2 : 4));
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) sums[r][row] = fma(one, v[row], sums[r][row]);
        }
    }
}

// t[row] = scale * A x[row], for kRows rows.
template <int kFormat, int kRows>
INLINE void reduce_rows(const AdapterPart& part, const FactorStream& stream, const act* const* x, size_t k,
                        float (*t)[kMaxRank]) {
    constexpr size_t kInputs = kFactorLine / (kFormat == kBfloat16 ? 2 : 4);
    const char* a = (const char*)part.a;
    for (size_t first = 0; first < size_t(part.rank); first += kRankGroup) {
        F sums[kRankGroup][kRows];
#pragma GCC unroll 4
        for (int r = 0; r < kRankGroup; ++r)
#pragma GCC unroll 4
            for (int row = 0; row < kRows; ++row) sums[r][row] = zero();
        size_t i = 0;
        for (; i + kInputs <= k; i += kInputs, a += kRankGroup * kFactorLine)
            reduce_line<kFormat, kRows, true>(a, stream, x, i, int(kInputs), sums);
        if (i < k) {
            reduce_line<kFormat, kRows, false>(a, stream, x, i, int(k - i), sums);
            a += kRankGroup * kFactorLine;
        }
        for (int r = 0; r < kRankGroup; ++r)
            for (int row = 0; row < kRows; ++row) t[row][first + r] = sum(sums[r][row]) * float(part.scale);
    }
}

#ifdef ACT_BF16
// Splits `count` values into bfloat16: the values rounded, and what the rounding left. Reads and writes whole vectors.
INLINE void split(const float* values, size_t count, uint16_t* high, uint16_t* low) {
    for (size_t i = 0; i < count; i += W) {
        const F value = load(values + i), rounded = act_round(value);
        _mm256_storeu_si256((__m256i*)(high + i), narrow(rounded));
        _mm256_storeu_si256((__m256i*)(low + i), narrow(sub(value, rounded)));
    }
}
#endif

// Activations, or logits, which are float32 for all activations.
INLINE F load_output(const act* p, int n) { return n >= W ? act_load(p) : act_load(p, n); }
INLINE void store_output(act* p, F v, int n) { n >= W ? act_store(p, v) : act_store(p, v, n); }
#ifdef ACT_BF16
INLINE F load_output(const float* p, int n) { return n >= W ? load(p) : load(p, n); }
INLINE void store_output(float* p, F v, int n) { n >= W ? store(p, v) : store(p, v, n); }
#endif

// Adds t B^T to the columns of the part and applies its gains, for kRows rows. t has a zero after an odd number of ranks.
template <int kFormat, int kRows, class Out>
INLINE void expand_rows(const AdapterPart& part, const FactorStream& stream, const float (*t)[kMaxRank], Out* const* y) {
    // A line of bfloat16 has the pairs of two ranks.
    constexpr size_t kPerLine = kFormat == kBfloat16 ? 2 : 1;
    const size_t lines = (size_t(part.rank) + kPerLine - 1) / kPerLine;
    const char* b = (const char*)part.b;
#ifdef ACT_BF16
    alignas(64) uint16_t high[kRows][kMaxRank], low[kRows][kMaxRank];
    if (kFormat == kBfloat16)
        for (int row = 0; row < kRows; ++row) split(t[row], 2 * lines, high[row], low[row]);
#endif
    for (int64_t chunk = 0; chunk * W < part.width; ++chunk) {
        const size_t column = size_t(part.offset + chunk * part.stride);
        const int left = part.width - chunk * W < W ? int(part.width - chunk * W) : W;
        F sums[kRows];
        for (F& one : sums) one = zero();
        for (size_t i = 0; i < lines; ++i, b += kFactorLine) {
            stream.fetch(b);
            if constexpr (kFormat == kBfloat16) {
#ifdef ACT_BF16
                const Word pairs = word_load((const uint32_t*)b);
#pragma GCC unroll 4
                for (int row = 0; row < kRows; ++row) {
                    sums[row] = dot(sums[row], word_broadcast((const uint32_t*)high[row] + i), pairs);
                    sums[row] = dot(sums[row], word_broadcast((const uint32_t*)low[row] + i), pairs);
                }
#else
#pragma GCC unroll 2
                for (int which = 0; which < 2; ++which) {
                    const F one = bfloat16_of_pairs((const uint32_t*)b, which);
#pragma GCC unroll 4
                    for (int row = 0; row < kRows; ++row)
                        sums[row] = fma(set1(t[row][2 * i + size_t(which)]), one, sums[row]);
                }
#endif
            } else {
                const F one = load((const float*)b);
#pragma GCC unroll 4
                for (int row = 0; row < kRows; ++row) sums[row] = fma(set1(t[row][i]), one, sums[row]);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
            Out* out = y[row] + column;
            F value = add(load_output(out, left), sums[row]);
            if (part.gains) value = mul(value, load(part.gains + chunk * W));
            if (part.shifts) value = add(value, load(part.shifts + chunk * W));
            store_output(out, value, left);
        }
    }
}

template <int kFormat, int kRows, class Out>
INLINE void adapt_rows(const AdapterPart& part, const FactorStream& stream, const act* const* x, Out* const* y, size_t k) {
    float t[kRows][kMaxRank];
    reduce_rows<kFormat, kRows>(part, stream, x, k, t);
    expand_rows<kFormat, kRows>(part, stream, t, y);
}

// The bits of a row do not depend on `count`: each sum has the same chain for any number of rows.
template <int kFormat, class Out>
INLINE void adapt_unit(const AdapterPart& part, const FactorStream& stream, const act* const* x, Out* const* y, int count,
                       size_t k) {
    switch (count) {
        case 1: return adapt_rows<kFormat, 1>(part, stream, x, y, k);
        case 2: return adapt_rows<kFormat, 2>(part, stream, x, y, k);
        case 3: return adapt_rows<kFormat, 3>(part, stream, x, y, k);
        default: return adapt_rows<kFormat, 4>(part, stream, x, y, k);
    }
}

// Returns the end of the factors of a linear layer, which are one stream from `parts[0].a` on.
INLINE const char* factors_end(const AdapterLinear& linear) {
    const AdapterPart& part = linear.parts[linear.count - 1];
    const size_t per_line = part.format == kBfloat16 ? 2 : 1;
    const size_t chunks = (size_t(part.width) + W - 1) / W, lines = (size_t(part.rank) + per_line - 1) / per_line;
    return (const char*)part.b + chunks * lines * kFactorLine;
}

// Changes the rows of y [T, N] by what their adapters make of the rows of x [T, K], and calls `finish` for each of them.
// which: AdaptedLinear; AdaptedEnd with layer 0.
template <class Out, class Finish>
INLINE void adapt(const Adapters* adapters, const AdapterRows& groups, size_t layer, int which, const act* x, size_t k,
                  Out* y, size_t n, Finish finish) {
    const auto linear_of = [&](size_t u) -> const AdapterLinear& {
        return adapters->adapters[groups.adapters[u]][layer * kAdaptedLinears + which];
    };
    quire::parallel_ranges(size_t(groups.units), 1, [&](size_t begin, size_t end) {
        for (size_t u = begin; u < end; ++u) {
            const AdapterLinear& linear = linear_of(u);
            const act* from[kAdapterRows];
            Out* to[kAdapterRows];
            const int32_t* rows = groups.rows + groups.starts[u];
            const int count = groups.starts[u + 1] - groups.starts[u];
            for (int i = 0; i < count; ++i) from[i] = x + size_t(rows[i]) * k, to[i] = y + size_t(rows[i]) * n;
            if (linear.count) {
                // The next factors of this thread: those of the next unit, or those of the first one in the next layer.
                const AdapterLinear& next = linear_of(u + 1 < end ? u + 1 : begin);
                FactorStream stream{factors_end(linear), 0};
                if (next.count)
                    stream.jump = (u + 1 < end ? (const char*)next.parts[0].a : factors_end(next)) - stream.end;
                for (int64_t p = 0; p < linear.count; ++p) {
                    const AdapterPart& part = linear.parts[p];
                    if (part.format == kBfloat16)
                        adapt_unit<kBfloat16>(part, stream, from, to, count, k);
                    else
                        adapt_unit<kWords>(part, stream, from, to, count, k);
                }
            }
            for (int i = 0; i < count; ++i) finish(size_t(rows[i]));
        }
    });
}

template <class Out>
INLINE void adapt(const Adapters* adapters, const AdapterRows& groups, size_t layer, int which, const act* x, size_t k,
                  Out* y, size_t n) {
    adapt(adapters, groups, layer, which, x, k, y, n, [](size_t) {});
}

// Changes embeddings of one row: t is the row of A of the token, [vocabulary][rank] for a part of an embedding.
template <int kFormat>
INLINE void adapt_embedding(const AdapterPart& part, size_t id, act* y) {
    float t[1][kMaxRank];
    const size_t rank = size_t(part.rank);
    for (size_t i = 0; i < rank; ++i) {
        const size_t at = id * rank + i;
        float one;
        if (kFormat == kBfloat16) {
            const uint32_t bits = uint32_t(((const uint16_t*)part.a)[at]) << 16;
            memcpy(&one, &bits, sizeof one);
        } else {
            one = ((const float*)part.a)[at];
        }
        t[0][i] = one * float(part.scale);
    }
    if (rank % 2) t[0][rank] = 0.f;
    const FactorStream stream{(const char*)part.b, 0};
    expand_rows<kFormat, 1>(part, stream, t, &y);
}

// Changes the embeddings [T, hidden] of the tokens that use an adapter. ids [T].
INLINE void adapt_embeddings(const Adapters* adapters, const int64_t* ids, act* embeddings, size_t hidden) {
    const AdapterRows& groups = adapters->tokens;
    quire::parallel_ranges(size_t(groups.units), 1, [&](size_t begin, size_t end) {
        for (size_t u = begin; u < end; ++u) {
            const AdapterLinear& linear = adapters->adapters[groups.adapters[u]][kAdaptEmbedding];
            for (int32_t i = groups.starts[u]; i < groups.starts[u + 1]; ++i)
                for (int64_t p = 0; p < linear.count; ++p) {
                    const size_t row = size_t(groups.rows[i]), id = size_t(ids[row]);
                    if (linear.parts[p].format == kBfloat16)
                        adapt_embedding<kBfloat16>(linear.parts[p], id, embeddings + row * hidden);
                    else
                        adapt_embedding<kWords>(linear.parts[p], id, embeddings + row * hidden);
                }
        }
    });
}

INLINE size_t gate_up_width(size_t inner) { return (inner + kPanel / 2 - 1) / (kPanel / 2) * kPanel; }

// out [inner] = what `gated` makes of gates and ups in the order of the panels of `pack_gate_up`. gate: as `output` there.
INLINE void gated_row(int gate, const act* gate_up, size_t inner, act* out) {
    for (size_t i = 0; i < inner; i += W) {
        const act* from = gate_up + i / (kPanel / 2) * kPanel + i % (kPanel / 2);
        const F v = gated(gate, act_load(from), act_load(from + kPanel / 2));
        if (i + W <= inner)
            act_store(out + i, v);
        else
            act_store(out + i, v, int(inner - i));
    }
}

// out [T, inner] = gated rows of gate_up with what their adapters make of the rows of x [T, K]. gate: as in `gated_row`.
INLINE void adapt_gate_up(const Adapters* adapters, const AdapterRows& groups, size_t layer, int gate, const act* x,
                          size_t k, act* gate_up, size_t rows, size_t inner, act* out) {
    const size_t width = gate_up_width(inner);
    const auto finish = [&](size_t row) { gated_row(gate, gate_up + row * width, inner, out + row * inner); };
    if (size_t(groups.starts[groups.units]) == rows)  // each row has an adapter
        return adapt(adapters, groups, layer, kAdaptGateUp, x, k, gate_up, width, finish);
    adapt(adapters, groups, layer, kAdaptGateUp, x, k, gate_up, width);
    quire::parallel_ranges(rows, 1 + (6 << 10) / inner, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) finish(row);
    });
}
