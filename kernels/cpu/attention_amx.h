// The inner loops of paged attention on AMX tiles. Included inside a level's namespace; see level_*.cpp.
//
// Head sizes are multiples of 16, so multiplications of eight words divide them. The values of sixteen keys are eight
// words too. Each loop prefetches the memory that the next chunk will read at the same place.

using quire::kChunkKeys;
using AttentionState = Tiles<8>;

// Multiplications read activations from memory, so other types are converted before.
constexpr bool kReadsStoredLines = false;

template <bool kTwoRows>
INLINE void score_rows(const uint32_t* queries, int rows, const uint32_t* b0, const uint32_t* b1, size_t words,
                       const char* next0, const char* next1, float* out) {
    zero_sums<kTwoRows, true>();
    for (size_t k = 0; k < words; k += 8) {
        for (int i = 0; i < 8; ++i, next0 += 64, next1 += 64) {
            _mm_prefetch(next0, _MM_HINT_T1);
            _mm_prefetch(next1, _MM_HINT_T1);
        }
        dot_tiles<kBf16Pairs, kTwoRows, true>(queries + k / 16 * rows * 16 + k % 16, b0 + k * 16, b1 + k * 16, 16);
    }
    store_sums<kTwoRows, true>(out, kChunkKeys);
}

INLINE void score_tile(AttentionState& tiles, KvType, const uint32_t* queries, int rows, const char* b0, const char* b1,
                       size_t words, const char* next0, const char* next1, float* out) {
    const auto *keys0 = (const uint32_t*)b0, *keys1 = (const uint32_t*)b1;
    tiles.shape(rows);
    if (rows > 16)
        score_rows<true>(queries, rows, keys0, keys1, words, next0, next1, out);
    else
        score_rows<false>(queries, rows, keys0, keys1, words, next0, next1, out);
}

template <bool kTwoRows, bool kTwoColumns>
INLINE void weigh_columns(const uint32_t* weights, int rows, const char* const* groups, const char* const* next,
                          int begin, int end, bool odd, size_t d, size_t column, float* out) {
    zero_sums<kTwoRows, kTwoColumns>();
    const int full = end - odd;
    for (int first = begin; first < end; first += 8) {
        const uint32_t* a = weights + first / 16 * rows * 16 + first % 16;
        const uint32_t* values = (const uint32_t*)groups[first / 8] + column;
        const char* fetched = next[first / 8] + column * 4;
        for (int i = 0; i < 8; ++i, fetched += d * 4) {
            _mm_prefetch(fetched, _MM_HINT_T1);
            if (kTwoColumns) _mm_prefetch(fetched + 64, _MM_HINT_T1);
        }
        if (first + 8 <= full) {
            dot_tiles<kBf16Pairs, kTwoRows, kTwoColumns>(a, values, values + 16, d);
            continue;
        }
        // Memory after the last key may hold NaN and must not be used.
        alignas(64) uint32_t rest[8 * 32] = {};
        const size_t width = kTwoColumns ? 32 : 16;
        for (int i = 0; first + i < end; ++i) {
            memcpy(rest + i * 32, values + i * d, width * 4);
            if (first + i < full) continue;
            for (size_t c = 0; c < width; ++c) rest[i * 32 + c] &= 0xffff;
        }
        dot_tiles<kBf16Pairs, kTwoRows, kTwoColumns>(a, rest, rest + 16, 32);
    }
    store_sums<kTwoRows, kTwoColumns>(out + column, d);
}

INLINE void weigh_tile(AttentionState& tiles, KvType, const uint32_t* weights, int rows, const char* const* groups,
                       const char* const* next, int begin, int end, bool odd, size_t d, float* out) {
    tiles.shape(rows);
    size_t column = 0;
    for (; column + 32 <= d; column += 32)
        if (rows > 16)
            weigh_columns<true, true>(weights, rows, groups, next, begin, end, odd, d, column, out);
        else
            weigh_columns<false, true>(weights, rows, groups, next, begin, end, odd, d, column, out);
    if (column == d) return;
    if (rows > 16)
        weigh_columns<true, false>(weights, rows, groups, next, begin, end, odd, d, column, out);
    else
        weigh_columns<false, false>(weights, rows, groups, next, begin, end, odd, d, column, out);
}
