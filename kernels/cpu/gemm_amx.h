// The inner loops of linear layers and of paged attention with AMX: eight tile registers of up to 16 rows of 64 bytes,
// and an instruction that multiplies two of them. Included inside a level's namespace; see level_*.cpp.
//
// Up to 32 rows (tiles 4 and 5) times 32 columns (tiles 6 and 7) are added to their sums: tiles 0 and 1 for the first
// 16 rows, 2 and 3 for the next 16. The layouts of gemm.h and rows.h are those of the instructions: a row of a tile is
// sixteen words of a packed row, or the same word of sixteen columns, of sixteen keys or of sixteen places of a value.
//
// One multiplication sums its words first, and then adds the result to the sum. A sum is one chain of multiplications,
// from zero. Rows do not affect each other, and words that are zero change nothing.

// Written as assembly, because compilers before GCC 14 do not know that `_tile_loadd` reads memory.
template <int kTile>
INLINE void tile_zero() {
    asm volatile("tilezero %%tmm%c0" ::"n"(kTile));
}

template <int kTile>
INLINE void tile_load(const void* from, size_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "n"(kTile) : "memory");
}

// Loads data that is not needed again.
template <int kTile>
INLINE void tile_load_once(const void* from, size_t row_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "n"(kTile) : "memory");
}

template <int kTile>
INLINE void tile_store(void* to, size_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "n"(kTile) : "memory");
}

template <int kSum, int kRows, int kColumns>
INLINE void tile_dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSum), "n"(kRows), "n"(kColumns));
}

// The configured shapes of this thread's tiles. The destructor releases the tiles, because the system switches a thread
// with unused tiles faster.
template <int kWords>  // words of each row and column in one multiplication
class Tiles {
  public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    ~Tiles() { asm volatile("tilerelease"); }

    // Configures tiles for `rows` rows, 1 to 32. If the shape changes, the tiles lose their contents.
    void shape(int rows) {
        const int first = rows < 16 ? rows : 16, second = rows - first;
        if (first == first_ && (second == 0 || second == second_)) return;
        first_ = first, second_ = second;
        struct {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        const int counts[] = {first, first, second, second, first, second, kWords, kWords};
        for (int i = 0; i < 8; ++i) {
            config.rows[i] = uint8_t(counts[i]);
            if (counts[i]) config.row_bytes[i] = i == 4 || i == 5 ? kWords * 4 : 64;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }

  private:
    int first_ = 0, second_ = 0;
};

// Adds to the sums the products of kWords words at `a`, rows of 16 words, and the words at b0 and b1. kTwoRows: `a` has
// two tiles; kTwoColumns: b1 is used; kOnce: no other rows need these columns.
template <bool kTwoRows, bool kTwoColumns, bool kOnce = false>
INLINE void dot_tiles(const uint32_t* a, const uint32_t* b0, const uint32_t* b1, size_t b_words) {
    kOnce ? tile_load_once<6>(b0, b_words * 4) : tile_load<6>(b0, b_words * 4);
    tile_load<4>(a, 64);
    tile_dot<0, 4, 6>();
    if (kTwoColumns) {
        kOnce ? tile_load_once<7>(b1, b_words * 4) : tile_load<7>(b1, b_words * 4);
        tile_dot<1, 4, 7>();
    }
    if (kTwoRows) {
        tile_load<5>(a + 16 * 16, 64);
        tile_dot<2, 5, 6>();
        if (kTwoColumns) tile_dot<3, 5, 7>();
    }
}

template <bool kTwoRows, bool kTwoColumns>
INLINE void zero_sums() {
    tile_zero<0>();
    if (kTwoColumns) tile_zero<1>();
    if (kTwoRows) tile_zero<2>();
    if (kTwoRows && kTwoColumns) tile_zero<3>();
}

template <bool kTwoRows, bool kTwoColumns>
INLINE void store_sums(float* out, size_t stride) {
    tile_store<0>(out, stride * 4);
    if (kTwoColumns) tile_store<1>(out + 16, stride * 4);
    if (kTwoRows) {
        tile_store<2>(out + 16 * stride, stride * 4);
        if (kTwoColumns) tile_store<3>(out + 16 * stride + 16, stride * 4);
    }
}

// Linear layers

using LinearState = Tiles<16>;

template <bool kTwoRows, Fetch kFetch>
INLINE void linear_sums(const uint32_t* a, size_t rows, const uint32_t* b, size_t words, const uint32_t* next,
                        float* sums) {
    zero_sums<kTwoRows, true>();
    size_t k = 0;
    for (; k + 16 <= words; k += 16, a += rows * 16, b += 16 * kPanel) {
        if (kFetch == kFetchOwn)
            for (int i = 0; i < 32; ++i) _mm_prefetch((const char*)(b + 16 * kPanel + i * 16), _MM_HINT_T0);
        if (kFetch == kFetchNext)
            for (int i = 0; i < 16; ++i, next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
        dot_tiles<kTwoRows, true, kFetch == kFetchOwn && !kTwoRows>(a, b, b + 16, kPanel);
    }
    if (k < words) {
        alignas(64) uint32_t rest[16 * kPanel] = {};  // another panel, or no memory, follows these words
        memcpy(rest, b, (words - k) * kPanel * 4);
        dot_tiles<kTwoRows, true>(a, rest, rest + 16, kPanel);
    }
    store_sums<kTwoRows, true>(sums, kPanel);
}

template <bool kTwoRows>
INLINE void linear_sums(const uint32_t* a, size_t rows, const uint32_t* b, size_t words, Fetch fetch,
                        const uint32_t* next, float* sums) {
    if (fetch == kFetchOwn)
        linear_sums<kTwoRows, kFetchOwn>(a, rows, b, words, next, sums);
    else if (fetch == kFetchNext)
        linear_sums<kTwoRows, kFetchNext>(a, rows, b, words, next, sums);
    else
        linear_sums<kTwoRows, kFetchNothing>(a, rows, b, words, next, sums);
}

INLINE void linear_tile(const Linear& job, LinearState& tiles, const uint32_t* packed, size_t row, size_t rows,
                        size_t panel, Fetch fetch, const uint32_t* next) {
    const size_t words = word_count(job.K);
    const uint32_t* b = job.weight + panel * words * kPanel;
    alignas(64) float sums[kTileRows * kPanel];
    tiles.shape(int(rows));
    if (rows > 16)
        linear_sums<true>(packed, rows, b, words, fetch, next, sums);
    else
        linear_sums<false>(packed, rows, b, words, fetch, next, sums);
    for (size_t r = 0; r < rows; ++r) {
        F acc[1][NV];
        for (int c = 0; c < NV; ++c) acc[0][c] = load(sums + r * kPanel + c * W);
        finish<1>(job, row + r, panel, acc);
    }
}

// Attention. Head sizes are multiples of 16, so multiplications of eight words divide them. The values of sixteen keys
// are eight words too.

using AttentionState = Tiles<8>;

template <bool kTwoRows>
INLINE void score_rows(const uint32_t* queries, int rows, const uint32_t* b0, const uint32_t* b1, size_t words,
                       float* out) {
    zero_sums<kTwoRows, true>();
    for (size_t k = 0; k < words; k += 8)
        dot_tiles<kTwoRows, true>(queries + k / 16 * rows * 16 + k % 16, b0 + k * 16, b1 + k * 16, 16);
    store_sums<kTwoRows, true>(out, kChunkKeys);
}

INLINE void score_tile(AttentionState& tiles, const uint32_t* queries, int rows, const uint32_t* b0, const uint32_t* b1,
                       size_t words, float* out) {
    tiles.shape(rows);
    if (rows > 16)
        score_rows<true>(queries, rows, b0, b1, words, out);
    else
        score_rows<false>(queries, rows, b0, b1, words, out);
}

template <bool kTwoRows, bool kTwoColumns>
INLINE void weigh_columns(const uint32_t* weights, int rows, const uint32_t* const* units, Lookahead& ahead, int begin,
                          int end, bool odd, size_t d, size_t column, float* out) {
    zero_sums<kTwoRows, kTwoColumns>();
    const int full = end - odd;
    for (int first = begin; first < end; first += 8) {
        const uint32_t* a = weights + first / 16 * rows * 16 + first % 16;
        const uint32_t* values = units[first / 8] + column;
        ahead.advance();
        if (first + 8 <= full) {
            dot_tiles<kTwoRows, kTwoColumns>(a, values, values + 16, d);
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
        dot_tiles<kTwoRows, kTwoColumns>(a, rest, rest + 16, 32);
    }
    store_sums<kTwoRows, kTwoColumns>(out + column, d);
}

INLINE void weigh_tile(AttentionState& tiles, const uint32_t* weights, int rows, const uint32_t* const* units,
                       Lookahead& ahead, int begin, int end, bool odd, size_t d, float* out) {
    tiles.shape(rows);
    size_t column = 0;
    for (; column + 32 <= d; column += 32)
        if (rows > 16)
            weigh_columns<true, true>(weights, rows, units, ahead, begin, end, odd, d, column, out);
        else
            weigh_columns<false, true>(weights, rows, units, ahead, begin, end, odd, d, column, out);
    if (column == d) return;
    if (rows > 16)
        weigh_columns<true, false>(weights, rows, units, ahead, begin, end, odd, d, column, out);
    else
        weigh_columns<false, false>(weights, rows, units, ahead, begin, end, odd, d, column, out);
}
