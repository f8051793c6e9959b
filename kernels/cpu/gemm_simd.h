// The inner loops of linear layers with vectors. Included inside a level's namespace; see level_*.cpp.

constexpr int kAhead = 12;  // prefetch distance, in words of each column

// acc[r][c] += a[r] . b[c]. Half of the columns are at b0 and half at b1; the next word of a column is kStep words on.
template <int MR, int kStep, Fetch kFetch>
INLINE void dot_rows(const uint32_t* a, const uint32_t* b0, const uint32_t* b1, size_t words, const uint32_t* next,
                     F (&acc)[MR][NV]) {
    for (size_t k0 = 0; k0 < words; k0 += 16, a += MR * 16) {
        const int n = words - k0 < 16 ? int(words - k0) : 16;
        for (int k = 0; k < n; ++k) {
            Word b[NV];
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) b[c] = word_load((c < NV / 2 ? b0 : b1) + c % (NV / 2) * W);
            if (kFetch == kFetchOwn) {
                _mm_prefetch((const char*)(b0 + kAhead * kStep), _MM_HINT_T0);
                _mm_prefetch((const char*)(b1 + kAhead * kStep), _MM_HINT_T0);
            } else if (kFetch == kFetchNext) {
                _mm_prefetch((const char*)next, _MM_HINT_T1);
                next += 16;
            }
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const Word x = word_broadcast(a + r * 16 + k);
#pragma GCC unroll 8
                for (int c = 0; c < NV; ++c) acc[r][c] = dot(acc[r][c], x, b[c]);
            }
            b0 += kStep;
            b1 += kStep;
        }
    }
}

// Linear layers

// A table of the instances of a function for 1 to 12 rows; entry 0 is empty.
#define FOR_12_ROWS(f) {nullptr, f<1>, f<2>, f<3>, f<4>, f<5>, f<6>, f<7>, f<8>, f<9>, f<10>, f<11>, f<12>}
#define FOR_3_ROWS(f) {nullptr, f<1>, f<2>, f<3>}
#if defined(LEVEL_AVX2)
#define FOR_TILE_ROWS FOR_3_ROWS
#else
#define FOR_TILE_ROWS FOR_12_ROWS
#endif

template <int MR>
INLINE void clear_sums(F (&acc)[MR][NV]) {
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
}

template <int MR>
void word_rows(const Linear& job, const uint32_t* rows, size_t row, size_t panel, const uint32_t* b, Fetch fetch,
               const uint32_t* next) {
    const size_t words = word_count(job.K);
    F acc[MR][NV];
    clear_sums(acc);
    if (fetch == kFetchOwn)
        dot_rows<MR, kPanel, kFetchOwn>(rows, b, b + kPanel / 2, words, next, acc);
    else if (fetch == kFetchNext)
        dot_rows<MR, kPanel, kFetchNext>(rows, b, b + kPanel / 2, words, next, acc);
    else
        dot_rows<MR, kPanel, kFetchNothing>(rows, b, b + kPanel / 2, words, next, acc);
    finish<MR>(job, row, panel, acc);
}

using LinearRows = void (*)(const Linear&, const uint32_t*, size_t, size_t, const uint32_t*, Fetch, const uint32_t*);

// A format of packed weights, as linear.h uses it: the words of activations.
struct WordFormat {
    static constexpr int kTile = kTileRows;  // the most rows of a tile
    static constexpr bool kExpands = false;  // panels become words in the cache first, if several tiles use them
    struct State {};                         // of a thread, between tiles

    INLINE size_t panel_words(size_t k) { return word_count(k) * kPanel; }
    INLINE size_t row_words(size_t k) { return line_count(k) * 16; }
    INLINE size_t row_offsets(size_t) { return 0; }

    INLINE void pack(const Linear& job, const Tiling& tiling, size_t row, const PackedRows& rows) {
        pack_row(tiling, row, job.x + row * job.K, job.K, rows.words);
    }

    // Computes `count` rows, from `row` on, of the panel that is at b.
    INLINE void tile(const Linear& job, State&, const PackedRows& rows, size_t row, size_t count, size_t panel,
                     const uint32_t* b, Fetch fetch, const uint32_t* next) {
        static constexpr LinearRows kRows[] = FOR_TILE_ROWS(word_rows);
        kRows[count](job, rows.words + row * row_words(job.K), row, panel, b, fetch, next);
    }
};

#ifndef ACT_BF16

// Weights of 16 bits for float activations. `Unit` reads the two values of each column in a unit. The sums have the
// bits of the same weights as floats.
template <class Unit, int MR>
void half_rows(const Linear& job, const uint32_t* rows, size_t row, size_t panel, const uint32_t* b) {
    F acc[MR][NV];
    clear_sums(acc);
    const auto step = [&](const uint32_t* a, const uint32_t* unit, int which) {
        F w[NV];
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) w[c] = Unit::value(unit, c, which);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const Word x = word_broadcast(a + r * 16);
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) acc[r][c] = dot(acc[r][c], x, w[c]);
        }
    };
    const size_t units = job.K / 2;
    for (size_t u = 0; u < units; ++u, b += kPanel) {
        const uint32_t* a = rows + u / 8 * MR * 16 + u % 8 * 2;
        _mm_prefetch((const char*)(b + kAhead * kPanel), _MM_HINT_T0);
        _mm_prefetch((const char*)(b + kAhead * kPanel + 16), _MM_HINT_T0);
        step(a, b, 0);
        step(a + 1, b, 1);
    }
    if (job.K % 2) step(rows + units / 8 * MR * 16 + units % 8 * 2, b, 0);
    finish<MR>(job, row, panel, acc);
}

template <class Unit>
struct HalfFormat : WordFormat {
    static constexpr bool kExpands = true;
    INLINE size_t panel_words(size_t k) { return (k + 1) / 2 * kPanel; }

    INLINE void tile(const Linear& job, State&, const PackedRows& rows, size_t row, size_t count, size_t panel,
                     const uint32_t* b, Fetch, const uint32_t*) {
        static constexpr HalfRows kRows[] = FOR_TILE_ROWS(rows_of);
        kRows[count](job, rows.words + row * row_words(job.K), row, panel, b);
    }

    INLINE size_t expanded_bytes(size_t k) { return (k + 1) * kPanel * sizeof(float); }

    // Writes a panel as words.
    INLINE void expand(const uint32_t* b, size_t k, uint32_t* words) {
        auto* out = (float*)words;
        for (size_t i = 0; i < k; i += 2, b += kPanel) {
            _mm_prefetch((const char*)(b + kAhead * kPanel), _MM_HINT_T0);
            _mm_prefetch((const char*)(b + kAhead * kPanel + 16), _MM_HINT_T0);
            for (int which = 0; which < 2; ++which)
                for (int c = 0; c < NV; ++c, out += W) store(out, Unit::value(b, c, which));
        }
    }

    // Computes a tile of a panel that `expand` wrote.
    INLINE void expanded_tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count,
                              size_t panel, const uint32_t* words, Fetch fetch, const uint32_t* next) {
        WordFormat::tile(job, state, rows, row, count, panel, words, fetch, next);
    }

  private:
    using HalfRows = void (*)(const Linear&, const uint32_t*, size_t, size_t, const uint32_t*);
    template <int MR>
    static constexpr HalfRows rows_of = half_rows<Unit, MR>;
};

struct Bfloat16Unit {
    INLINE F value(const uint32_t* unit, int c, int which) { return bfloat16_of_pairs(unit + c * W, which); }
};

struct Float16Unit {
    INLINE F value(const uint32_t* unit, int c, int which) {
        return load_float16((const uint16_t*)unit + which * kPanel + c * W);
    }
};

#endif
