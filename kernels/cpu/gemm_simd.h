// The inner loops of linear layers and of paged attention with vectors. Included inside a level's namespace; see
// level_*.cpp.

constexpr int kAhead = 12;  // prefetch distance, in words of each column

// The state that a thread keeps between tiles: none here (see gemm_amx.h).
struct LinearState {};
struct AttentionState {};

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

template <int MR>
void linear_rows(const Linear& job, const uint32_t* rows, size_t row, size_t panel, Fetch fetch, const uint32_t* next) {
    const size_t words = word_count(job.K);
    const uint32_t* b = job.weight + panel * words * kPanel;
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    if (fetch == kFetchOwn)
        dot_rows<MR, kPanel, kFetchOwn>(rows, b, b + kPanel / 2, words, next, acc);
    else if (fetch == kFetchNext)
        dot_rows<MR, kPanel, kFetchNext>(rows, b, b + kPanel / 2, words, next, acc);
    else
        dot_rows<MR, kPanel, kFetchNothing>(rows, b, b + kPanel / 2, words, next, acc);
    finish<MR>(job, row, panel, acc);
}

using LinearRows = void (*)(const Linear&, const uint32_t*, size_t, size_t, Fetch, const uint32_t*);
#if defined(LEVEL_AVX2)
constexpr LinearRows kLinearRows[] = {nullptr, linear_rows<1>, linear_rows<2>, linear_rows<3>};
#else
constexpr LinearRows kLinearRows[] = {nullptr,        linear_rows<1>,  linear_rows<2>,  linear_rows<3>, linear_rows<4>,
                                       linear_rows<5>, linear_rows<6>,  linear_rows<7>,  linear_rows<8>, linear_rows<9>,
                                       linear_rows<10>, linear_rows<11>, linear_rows<12>};
#endif

INLINE void linear_tile(const Linear& job, LinearState&, const uint32_t* packed, size_t row, size_t rows, size_t panel,
                        Fetch fetch, const uint32_t* next) {
    kLinearRows[rows](job, packed, row, panel, fetch, next);
}

// Attention

// Computes the scores of the 16 keys at b0 and of the 16 keys at b1.
template <int MR>
void score_rows(const uint32_t* rows, const uint32_t* b0, const uint32_t* b1, size_t words, float* out) {
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    dot_rows<MR, 16, kFetchNothing>(rows, b0, b1, words, nullptr, acc);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) store(out + r * kChunkKeys + c * W, acc[r][c]);
}

// out[r][0 .. NS * W) = the sum of weight[r] . value over the words [begin, end) of the chunk. odd: of the last word
// only the first value counts.
template <int MR, int NS>
void weigh_rows(const uint32_t* weights, const uint32_t* const* units, size_t column, Lookahead& ahead, int begin,
                int end, bool odd, size_t d, float* out) {
    F acc[MR][NS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) acc[r][c] = zero();
    const auto step = [&](const uint32_t* w, const uint32_t* values, bool low) {
        Word b[NS];
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) b[c] = low ? word_load_low(values + c * W) : word_load(values + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const Word x = word_broadcast(w + r * 16);
#pragma GCC unroll 8
            for (int c = 0; c < NS; ++c) acc[r][c] = dot(acc[r][c], x, b[c]);
        }
    };
    const int full = end - odd;
    for (int first = begin; first < end; first += kUnitWords) {
        const uint32_t* w = weights + first / 16 * MR * 16 + first % 16;
        const uint32_t* values = units[first / kUnitWords] + column;
        const int stop = full - first < kUnitWords ? full - first : kUnitWords;
        ahead.advance();
        for (int i = 0; i < stop; ++i, values += d) step(w + i, values, false);
        if (stop < kUnitWords && odd) step(w + stop, values, true);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) store(out + r * d + c * W, acc[r][c]);
}

using ScoreRows = void (*)(const uint32_t*, const uint32_t*, const uint32_t*, size_t, float*);
using WeighRows = void (*)(const uint32_t*, const uint32_t* const*, size_t, Lookahead&, int, int, bool, size_t, float*);
#define WEIGH(n) {weigh_rows<n, 1>, weigh_rows<n, 2>, weigh_rows<n, 4>}
#if defined(LEVEL_AVX2)
constexpr ScoreRows kScoreRows[] = {nullptr, score_rows<1>, score_rows<2>, score_rows<3>};
constexpr WeighRows kWeighRowsOf[][3] = {{}, WEIGH(1), WEIGH(2)};
#else
constexpr ScoreRows kScoreRows[] = {nullptr,        score_rows<1>,  score_rows<2>,  score_rows<3>, score_rows<4>,
                                     score_rows<5>,  score_rows<6>,  score_rows<7>,  score_rows<8>, score_rows<9>,
                                     score_rows<10>, score_rows<11>, score_rows<12>};
constexpr WeighRows kWeighRowsOf[][3] = {{}, WEIGH(1), WEIGH(2), WEIGH(3), WEIGH(4), WEIGH(5), WEIGH(6)};
#endif
#undef WEIGH

INLINE void score_tile(AttentionState&, const uint32_t* queries, int rows, const uint32_t* b0, const uint32_t* b1,
                       size_t words, float* out) {
    kScoreRows[rows](queries, b0, b1, words, out);
}

INLINE void weigh_tile(AttentionState&, const uint32_t* weights, int rows, const uint32_t* const* units,
                       Lookahead& ahead, int begin, int end, bool odd, size_t d, float* out) {
    for (size_t v = 0, vectors = d / W; v < vectors;) {
        const int size = vectors - v >= 4 ? 2 : vectors - v >= 2 ? 1 : 0;
        kWeighRowsOf[rows][size](weights, units, v * W, ahead, begin, end, odd, d, out + v * W);
        v += size_t(1) << size;
    }
}
