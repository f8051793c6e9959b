// The inner loops of paged attention with vectors. Included inside a level's namespace; see level_*.cpp.
//
// Each loop prefetches the memory that the next chunk will read at the same place, line by line: prefetches in bursts
// would wait for each other, while the products wait for them.
//
// The loops read lines of the cache in any of its types and convert them in registers (load_line), or read lines of
// activations, if a group was converted before because several tiles of rows read it. Both add the same products in the
// same order.

using quire::kChunkKeys;

// True: tiles read lines of the cache in its own type.
constexpr bool kReadsStoredLines = true;

// The state that a thread keeps between tiles: none here (see attention_amx.h).
struct AttentionState {};

// Computes the scores of the 16 keys at b0 and of the 16 keys at b1. words: of a row. next0, next1: the groups to
// prefetch.
template <int MR, KvType kType>
void score_rows(const uint32_t* rows, const char* b0, const char* b1, size_t words, const char* next0,
                const char* next1, float* out) {
    constexpr int kWords = kLineWords<kType>, kBytes = kLineBytes<kType>;
    F acc[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) acc[r][0] = acc[r][1] = zero();
    for (size_t k0 = 0; k0 < words; k0 += 16, rows += MR * 16) {
        const int n = words - k0 < 16 ? int(words - k0) : 16;
        for (int k = 0; k < n; k += kWords, b0 += kBytes, b1 += kBytes, next0 += kBytes, next1 += kBytes) {
            Word first[kWords], second[kWords];
            load_line<kType>(b0, first);
            load_line<kType>(b1, second);
            _mm_prefetch(next0, _MM_HINT_T1);
            _mm_prefetch(next1, _MM_HINT_T1);
#pragma GCC unroll 2
            for (int i = 0; i < kWords; ++i)
#pragma GCC unroll 16
                for (int r = 0; r < MR; ++r) {
                    const Word x = word_broadcast(rows + r * 16 + k + i);
                    acc[r][0] = dot(acc[r][0], x, first[i]);
                    acc[r][1] = dot(acc[r][1], x, second[i]);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) {
        store(out + r * kChunkKeys, acc[r][0]);
        store(out + r * kChunkKeys + 16, acc[r][1]);
    }
}

// out[r][0 .. NS * W) = the sum of weight[r] . value over the words [begin, end) of the chunk. `begin` is that of a
// group. odd: of the last word only the first value counts. next: the groups to prefetch.
template <int MR, int NS, KvType kType>
void weigh_rows(const uint32_t* weights, const char* const* groups, const char* const* next, size_t column, int begin,
                int end, bool odd, size_t d, float* out) {
    constexpr int kWords = kLineWords<kType>, kBytes = kLineBytes<kType>;
    const size_t step_bytes = d / 16 * kBytes, column_bytes = column / 16 * kBytes;
    F acc[MR][NS];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) acc[r][c] = zero();
    // Adds the products with the first `count` words of NS lines.
    const auto step = [&](const uint32_t* w, const char* values, int count, bool low) {
        Word b[NS][kWords];
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) {
            load_line<kType>(values + c * kBytes, b[c]);
            if (low) b[c][0] = word_low(b[c][0]);
        }
#pragma GCC unroll 2
        for (int i = 0; i < kWords; ++i) {
            if (i >= count) break;
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) {
                const Word x = word_broadcast(w + r * 16 + i);
#pragma GCC unroll 8
                for (int c = 0; c < NS; ++c) acc[r][c] = dot(acc[r][c], x, b[c][i]);
            }
        }
    };
    const int full = end - odd;
    for (int first = begin; first < end; first += kUnitWords) {
        const uint32_t* w = weights + first / 16 * MR * 16 + first % 16;
        const char* values = groups[first / kUnitWords] + column_bytes;
        const char* fetched = next[first / kUnitWords] + column_bytes;
        const int stop = full - first < kUnitWords ? full - first : kUnitWords;
        int i = 0;
        for (; i + kWords <= stop; i += kWords, values += step_bytes, fetched += step_bytes) {
#pragma GCC unroll 8
            for (int c = 0; c < NS; ++c)
                if (kBytes == 64 || NS == 1 || c % 2 == 0) _mm_prefetch(fetched + c * kBytes, _MM_HINT_T1);
            step(w + i, values, kWords, false);
        }
        // The second word of the last line is not used: it may be NaN.
        if (kWords > 1 && i < stop) step(w + i, values, stop - i, false);
        if (stop < kUnitWords && odd) step(w + stop, values, 1, true);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NS; ++c) store(out + r * d + c * W, acc[r][c]);
}

using ScoreRows = void (*)(const uint32_t*, const char*, const char*, size_t, const char*, const char*, float*);
using WeighRows = void (*)(const uint32_t*, const char* const*, const char* const*, size_t, int, int, bool, size_t,
                           float*);

// The instances for each number of rows; weigh_rows also for 1, 2 and, with AVX-512, 4 vectors of columns.
#if defined(LEVEL_AVX2)
constexpr int kWeighSizes = 2;
#define WEIGH(n) {weigh_rows<n, 1, kType>, weigh_rows<n, 2, kType>}
#else
constexpr int kWeighSizes = 3;
#define WEIGH(n) {weigh_rows<n, 1, kType>, weigh_rows<n, 2, kType>, weigh_rows<n, 4, kType>}
#endif
#define SCORE(n) score_rows<n, kType>

template <KvType kType>
struct AttentionLoops {
#if defined(LEVEL_AVX2)
    static constexpr ScoreRows score[] = {nullptr, SCORE(1), SCORE(2), SCORE(3)};
    static constexpr WeighRows weigh[][kWeighSizes] = {{}, WEIGH(1), WEIGH(2), WEIGH(3)};
#else
    static constexpr ScoreRows score[] = {nullptr,  SCORE(1), SCORE(2), SCORE(3),  SCORE(4),  SCORE(5), SCORE(6),
                                          SCORE(7), SCORE(8), SCORE(9), SCORE(10), SCORE(11), SCORE(12)};
    static constexpr WeighRows weigh[][kWeighSizes] = {{},       WEIGH(1), WEIGH(2), WEIGH(3),
                                                       WEIGH(4), WEIGH(5), WEIGH(6)};
#endif
};

#undef WEIGH
#undef SCORE

// Calls use(AttentionLoops<type>()).
template <class Use>
INLINE void with_loops(KvType type, Use use) {
    if (type == kKvAct)
        use(AttentionLoops<kKvAct>());
    else if (type == kKvInt8)
        use(AttentionLoops<kKvInt8>());
    else if (type == kKvFp8)
        use(AttentionLoops<kKvFp8>());
#ifndef ACT_BF16
    else
        use(AttentionLoops<kKvBf16>());
#endif
}

// type: of the lines at b0 and b1.
INLINE void score_tile(AttentionState&, KvType type, const uint32_t* queries, int rows, const char* b0, const char* b1,
                       size_t words, const char* next0, const char* next1, float* out) {
    with_loops(type, [&](auto loops) { loops.score[rows](queries, b0, b1, words, next0, next1, out); });
}

// type: of the lines in `groups`.
INLINE void weigh_tile(AttentionState&, KvType type, const uint32_t* weights, int rows, const char* const* groups,
                       const char* const* next, int begin, int end, bool odd, size_t d, float* out) {
    with_loops(type, [&](auto loops) {
        for (size_t v = 0, vectors = d / W; v < vectors;) {
            int size = kWeighSizes - 1;
            while (vectors - v < size_t(1) << size) --size;
            loops.weigh[rows][size](weights, groups, next, v * W, begin, end, odd, d, out + v * W);
            v += size_t(1) << size;
        }
    });
}
