// Linear layers whose weights are codes of 4 to 8 bits with a scale per column and group of values. Included inside a
// level's namespace; see level_*.cpp.
//
// A code is expanded to a float, w = value * scale or (value - zero) * scale, rounded once. Activations are not rounded.
// With float activations the sums have the bits of the same weights as floats. With bf16 activations a panel becomes
// words of bf16 in the cache first, each weight rounded once more.
//
// A group of 32 values of a panel is [32 columns] headers and then units of [32 columns][4 bytes], the first value of a
// word in its lowest bits. A header has the scale as a float. With zero points the lowest 8 bits of the header are the
// zero point, and those of the scale are zeros. `KQuants` and `Nvfp4Groups` have layouts of their own.
//
// `Weights::order`, if it is not null, is the order in which the values of a row of activations are multiplied: the input
// features of a group need not be neighbours (act-order).

struct Scaling {
    F scale, offset;
};

// 4 bits with a zero point in 0..16.
struct Uint4Codes {
    static constexpr int kBits = 4;
    INLINE Scaling scaling(const uint32_t* header) {
        const I word = int_load(header);
        const F scale = float_of_bits(int_and(word, int_set1(~255)));
        return {scale, sub(zero(), mul(to_float(int_and(word, int_set1(255))), scale))};
    }
    // Offsets and results have at most 21 bits: nothing is rounded.
    INLINE F value(I code, const Scaling& s) { return fma(float_of_uint4(code), s.scale, s.offset); }
    INLINE I next(I code) { return shift_right_4(code); }
};

// 8 bits with a zero point in 0..255.
struct Uint8Codes {
    static constexpr int kBits = 8;
    INLINE Scaling scaling(const uint32_t* header) { return Uint4Codes::scaling(header); }
    // Offsets have at most 24 bits, and the result is rounded once.
    INLINE F value(I code, const Scaling& s) { return fma(float_of_uint8(code), s.scale, s.offset); }
    INLINE I next(I code) { return shift_right_8(code); }
};

// E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a sign.
struct Mxfp4Codes {
    static constexpr int kBits = 4;
    INLINE Scaling scaling(const uint32_t* header) { return {load((const float*)header), zero()}; }
    INLINE F value(I code, const Scaling& s) { return mul(float_of_e2m1(code), s.scale); }
    INLINE I next(I code) { return shift_right_4(code); }
};

// E4M3.
struct Fp8Codes {
    static constexpr int kBits = 8;
    INLINE Scaling scaling(const uint32_t* header) { return {load((const float*)header), zero()}; }
    INLINE F value(I code, const Scaling& s) { return mul(float_of_e4m3(code), s.scale); }
    INLINE I next(I code) { return shift_right_8(code); }
};

// 8 bits with a sign.
struct Sint8Codes {
    static constexpr int kBits = 8;
    INLINE Scaling scaling(const uint32_t* header) { return {load((const float*)header), zero()}; }
    INLINE F value(I code, const Scaling& s) { return mul(float_of_int8(code), s.scale); }
    INLINE I next(I code) { return shift_right_8(code); }
};

// The 16 values of a code of 4 bits. `TABLES` in grouped_weight.py has the same numbers.
struct Nf4 {
    static constexpr float kValues[16] = {
        -1.f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
        -0.18477343022823334f, -0.09105003625154495f, 0.f, 0.07958029955625534f, 0.16093020141124725f,
        0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.f};
};
struct Fp4 {
    static constexpr float kValues[16] = {
        0.f, .0625f / 12, 8.f / 12, 1.f, 4.f / 12, 6.f / 12, 2.f / 12, 3.f / 12,
        -0.f, -.0625f / 12, -8.f / 12, -1.f, -4.f / 12, -6.f / 12, -2.f / 12, -3.f / 12};
};

template <class Table>
struct TableCodes {
    static constexpr int kBits = 4;
    INLINE Scaling scaling(const uint32_t* header) { return {load((const float*)header), zero()}; }
    INLINE F value(I code, const Scaling& s) { return mul(float_of_table(code, load(Table::kValues)), s.scale); }
    INLINE I next(I code) { return shift_right_4(code); }
};

constexpr size_t kGroupValues = 32;
constexpr int kAheadGrouped = 12;  // prefetch distance in units

// A panel of groups. `for_weights` calls step(i, w) for each value i of a row in order, with its weight of each column.
template <class Codes>
struct Groups {
    INLINE size_t panel_words(size_t k) {
        return (k + kGroupValues - 1) / kGroupValues * (1 + kGroupValues * Codes::kBits / 32) * kPanel;
    }

    template <class Step>
    INLINE void for_weights(const uint32_t* b, size_t k, Step step) {
        constexpr size_t kPerUnit = 32 / Codes::kBits;
        for (size_t i = 0; i < k;) {
            Scaling scaling[NV];
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) scaling[c] = Codes::scaling(b + c * W);
            b += kPanel;
            for (size_t u = 0; u < kGroupValues; u += kPerUnit, b += kPanel) {
                _mm_prefetch((const char*)(b + kAheadGrouped * kPanel), _MM_HINT_T0);
                _mm_prefetch((const char*)(b + kAheadGrouped * kPanel + 16), _MM_HINT_T0);
                I codes[NV];
#pragma GCC unroll 8
                for (int c = 0; c < NV; ++c) codes[c] = int_load(b + c * W);
                const size_t count = k - i < kPerUnit ? k - i : kPerUnit;
                for (size_t j = 0; j < count; ++j, ++i) {
                    F w[NV];
#pragma GCC unroll 8
                    for (int c = 0; c < NV; ++c) {
                        w[c] = Codes::value(codes[c], scaling[c]);
                        codes[c] = Codes::next(codes[c]);
                    }
                    step(i, w);
                }
                if (i == k) return;
            }
        }
    }
};

// A panel of K-quants: w = code * (scale * factor) - minimum * offset, with a scale and a minimum per 256 values, and a
// factor and an offset of signed 8 bits per 16 values. scale * factor and minimum * offset are exact if scale and minimum
// have at most 16 bits, so that a weight is rounded once.
//
// A block of 256 values has two words of each column, scale and minimum as floats, and then 8 groups of 32 values. The
// first word of a group is factor, offset, factor, offset, from the lowest byte. Then come 4 words with the lowest 4 bits
// of 8 codes each, and for codes of 6 bits 2 words with the highest 2 bits of 16 codes each.
template <int kBits>
struct KQuants {
    static constexpr size_t kBlockValues = 256, kGroupWords = 1 + kBits;

    INLINE size_t panel_words(size_t k) {
        return k / kBlockValues * (2 + kBlockValues / kGroupValues * kGroupWords) * kPanel;
    }

    template <class Step>
    INLINE void for_weights(const uint32_t* b, size_t k, Step step) {
        for (size_t i = 0; i < k;) {
            F scale[NV], minimum[NV];
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) {
                scale[c] = load((const float*)b + c * W);
                minimum[c] = load((const float*)b + kPanel + c * W);
            }
            b += 2 * kPanel;
            for (size_t group = 0; group < kBlockValues / kGroupValues; ++group, b += kGroupWords * kPanel) {
                for (size_t line = 0; line < 2 * kGroupWords; ++line)
                    _mm_prefetch((const char*)(b + kAheadGrouped * kPanel + line * 16), _MM_HINT_T0);
                for (int half = 0; half < 2; ++half) {
                    F factor[NV], offset[NV];
                    I high[NV];
#pragma GCC unroll 8
                    for (int c = 0; c < NV; ++c) {
                        I bytes = int_load(b + c * W);
                        if (half) bytes = shift_right_8(shift_right_8(bytes));
                        factor[c] = mul(scale[c], float_of_int8(bytes));
                        offset[c] = sub(zero(), mul(minimum[c], float_of_int8(shift_right_8(bytes))));
                        high[c] = kBits == 6 ? int_load(b + (5 + half) * kPanel + c * W) : int_zero();
                    }
                    for (int unit = 2 * half; unit < 2 * half + 2; ++unit) {
                        I low[NV];
#pragma GCC unroll 8
                        for (int c = 0; c < NV; ++c) low[c] = int_load(b + (1 + unit) * kPanel + c * W);
                        for (int j = 0; j < 8; ++j, ++i) {
                            F w[NV];
#pragma GCC unroll 8
                            for (int c = 0; c < NV; ++c) {
                                F code = float_of_uint4(low[c]);
                                low[c] = shift_right_4(low[c]);
                                if (kBits == 6) {
                                    code = fma(to_float(int_and(high[c], int_set1(3))), set1(16.f), code);
                                    high[c] = shift_right_2(high[c]);
                                }
                                w[c] = fma(code, factor[c], offset[c]);
                            }
                            step(i, w);
                        }
                    }
                }
            }
        }
    }
};

// A panel of NVFP4: w = E2M1 * (E4M3 * scale), with the E4M3 of 16 values and the scale of a column. Both products are
// rounded. Values come in multiples of 16.
//
// The first word of a column is its scale, a float. A block of 64 values has a word of each column, the E4M3 numbers of
// its four groups from the lowest byte, and then 8 words with 8 codes each. A last block of fewer values has zeros.
struct Nvfp4Groups {
    static constexpr size_t kBlockValues = 64, kBlockWords = 1 + kBlockValues / 8;

    INLINE size_t panel_words(size_t k) { return (1 + (k + kBlockValues - 1) / kBlockValues * kBlockWords) * kPanel; }

    template <class Step>
    INLINE void for_weights(const uint32_t* b, size_t k, Step step) {
        F column[NV];
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) column[c] = load((const float*)b + c * W);
        b += kPanel;
        for (size_t i = 0; i < k;) {
            I scales[NV];
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) scales[c] = int_load(b + c * W);
            b += kPanel;
            const size_t end = k - i < kBlockValues ? k : i + kBlockValues;
            while (i < end) {
                F scale[NV];
#pragma GCC unroll 8
                for (int c = 0; c < NV; ++c) {
                    scale[c] = mul(float_of_e4m3(scales[c]), column[c]);
                    scales[c] = shift_right_8(scales[c]);
                }
                for (int unit = 0; unit < 2; ++unit, b += kPanel) {
                    _mm_prefetch((const char*)(b + kAheadGrouped * kPanel), _MM_HINT_T0);
                    _mm_prefetch((const char*)(b + kAheadGrouped * kPanel + 16), _MM_HINT_T0);
                    I codes[NV];
#pragma GCC unroll 8
                    for (int c = 0; c < NV; ++c) codes[c] = int_load(b + c * W);
                    for (int j = 0; j < 8; ++j, ++i) {
                        F w[NV];
#pragma GCC unroll 8
                        for (int c = 0; c < NV; ++c) {
                            w[c] = mul(float_of_e2m1(codes[c]), scale[c]);
                            codes[c] = shift_right_4(codes[c]);
                        }
                        step(i, w);
                    }
                }
            }
        }
    }
};

#ifndef ACT_BF16

template <class Panel, int MR>
void grouped_rows(const Linear& job, const uint32_t* rows, size_t row, size_t panel, const uint32_t* b) {
    F acc[MR][NV];
    clear_sums(acc);
    Panel::for_weights(b, job.K, [&](size_t i, F (&w)[NV]) {
        const uint32_t* a = rows + i / 16 * MR * 16 + i % 16;
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const Word x = word_broadcast(a + r * 16);
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) acc[r][c] = dot(acc[r][c], x, w[c]);
        }
    });
    finish<MR>(job, row, panel, acc);
}

#endif

// Copies the values of a row in an order.
INLINE void reorder(const act* x, const int32_t* order, size_t k, act* out) {
    for (size_t i = 0; i < k; ++i) out[i] = x[order[i]];
}

// Panel: `Groups`, `KQuants` or `Nvfp4Groups`.
template <class Panel>
struct GroupedFormat : WordFormat {
    static constexpr bool kExpands = true;
    using State = typename WordFormat::State;

    INLINE size_t panel_words(size_t k) { return Panel::panel_words(k); }

    INLINE void pack(const Linear& job, const Tiling& tiling, size_t row, const PackedRows& rows) {
        const act* x = job.x + row * job.K;
        if (job.weights.order) {
            auto* ordered = (act*)quire::scratch(quire::kTile, job.K * sizeof(act));
            reorder(x, job.weights.order, job.K, ordered);
            x = ordered;
        }
        pack_row(tiling, row, x, job.K, rows.words);
    }

    INLINE size_t expanded_bytes(size_t k) { return (k + kPerWord - 1) / kPerWord * kPanel * 4; }

    // Writes a panel as words.
    INLINE void expand(const uint32_t* b, size_t k, uint32_t* words) {
#ifdef ACT_BF16
        F even[NV];
        Panel::for_weights(b, k, [&](size_t i, F (&w)[NV]) {
            for (int c = 0; c < NV; ++c) {
                const bool is_last = i + 1 == k;
                if (i % 2)
                    word_store(words + i / 2 * kPanel + c * W, word_of(even[c], w[c]));
                else if (is_last)
                    word_store(words + i / 2 * kPanel + c * W, word_of(w[c], zero()));
                else
                    even[c] = w[c];
            }
        });
#else
        Panel::for_weights(b, k, [&](size_t i, F (&w)[NV]) {
            for (int c = 0; c < NV; ++c) word_store(words + i * kPanel + c * W, w[c]);
        });
#endif
    }

    INLINE void tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count, size_t panel,
                     const uint32_t* b, Fetch, const uint32_t*) {
#ifdef ACT_BF16
        auto* words = (uint32_t*)quire::scratch(quire::kTile, expanded_bytes(job.K));
        expand(b, job.K, words);
        WordFormat::tile(job, state, rows, row, count, panel, words, kFetchNothing, nullptr);
#else
        (void)state;
        static constexpr GroupedRows kRows[] = FOR_TILE_ROWS(rows_of);
        kRows[count](job, rows.words + row * row_words(job.K), row, panel, b);
#endif
    }

    // Computes a tile of a panel that `expand` wrote.
    INLINE void expanded_tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count,
                              size_t panel, const uint32_t* words, Fetch, const uint32_t*) {
        WordFormat::tile(job, state, rows, row, count, panel, words, kFetchNothing, nullptr);
    }

#ifndef ACT_BF16
  private:
    using GroupedRows = void (*)(const Linear&, const uint32_t*, size_t, size_t, const uint32_t*);
    template <int MR>
    static constexpr GroupedRows rows_of = grouped_rows<Panel, MR>;
#endif
};
