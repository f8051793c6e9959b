// Linear layers whose weights are codes of 4 or 8 bits with a scale per column and group of 32 values. Included inside a
// level's namespace; see level_*.cpp.
//
// A code is expanded to a float, w = value * scale or (value - zero) * scale, rounded once. Activations are not rounded.
// With float activations the sums have the bits of the same weights as floats. With bf16 activations a panel becomes
// words of bf16 in the cache first, each weight rounded once more.
//
// A group of a panel is [32 columns] headers and then units of [32 columns][4 bytes], the first value of a word in its
// lowest bits. A header has the scale as a float. With zero points the lowest 8 bits of the header are the zero point,
// and those of the scale are zeros.

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

constexpr size_t kGroupValues = 32;
constexpr int kAheadGrouped = 12;  // prefetch distance in units

// Calls step(i, w) for each value i of a row in order, with its weight of each column.
template <class Codes, class Step>
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

#ifndef ACT_BF16

template <class Codes, int MR>
void grouped_rows(const Linear& job, const uint32_t* rows, size_t row, size_t panel, const uint32_t* b) {
    F acc[MR][NV];
    clear_sums(acc);
    for_weights<Codes>(b, job.K, [&](size_t i, F (&w)[NV]) {
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

template <class Codes>
struct GroupedFormat : WordFormat {
    static constexpr bool kExpands = true;
    using State = typename WordFormat::State;

    INLINE size_t panel_words(size_t k) {
        return (k + kGroupValues - 1) / kGroupValues * (1 + kGroupValues * Codes::kBits / 32) * kPanel;
    }

    INLINE size_t expanded_bytes(size_t k) { return (k + kPerWord - 1) / kPerWord * kPanel * 4; }

    // Writes a panel as words.
    INLINE void expand(const uint32_t* b, size_t k, uint32_t* words) {
#ifdef ACT_BF16
        F even[NV];
        for_weights<Codes>(b, k, [&](size_t i, F (&w)[NV]) {
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
        for_weights<Codes>(b, k, [&](size_t i, F (&w)[NV]) {
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
    static constexpr GroupedRows rows_of = grouped_rows<Codes, MR>;
#endif
};
