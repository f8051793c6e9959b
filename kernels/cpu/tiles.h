// Products with AMX: eight tile registers of up to 16 rows of 64 bytes, and instructions that multiply two of them.
// Included inside a level's namespace; see level_*.cpp.
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

// The values of a word: two bf16 values; or four bytes with int32 sums, signed in rows and unsigned or signed in columns.
constexpr size_t kTilesAhead = 4;

enum TileValues { kBf16Pairs, kBytes, kSignedBytes };

template <TileValues kValues, int kSum, int kRows, int kColumns>
INLINE void tile_dot() {
    if (kValues == kBf16Pairs)
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSum), "n"(kRows), "n"(kColumns));
    else if (kValues == kSignedBytes)
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSum), "n"(kRows), "n"(kColumns));
    else
        asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(kSum), "n"(kRows), "n"(kColumns));
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
template <TileValues kValues, bool kTwoRows, bool kTwoColumns, bool kOnce = false>
INLINE void dot_tiles(const uint32_t* a, const uint32_t* b0, const uint32_t* b1, size_t b_words) {
    kOnce ? tile_load_once<6>(b0, b_words * 4) : tile_load<6>(b0, b_words * 4);
    tile_load<4>(a, 64);
    tile_dot<kValues, 0, 4, 6>();
    if (kTwoColumns) {
        kOnce ? tile_load_once<7>(b1, b_words * 4) : tile_load<7>(b1, b_words * 4);
        tile_dot<kValues, 1, 4, 7>();
    }
    if (kTwoRows) {
        tile_load<5>(a + 16 * 16, 64);
        tile_dot<kValues, 2, 5, 6>();
        if (kTwoColumns) tile_dot<kValues, 3, 5, 7>();
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
INLINE void store_sums(void* to, size_t stride) {
    auto* out = (uint32_t*)to;
    tile_store<0>(out, stride * 4);
    if (kTwoColumns) tile_store<1>(out + 16, stride * 4);
    if (kTwoRows) {
        tile_store<2>(out + 16 * stride, stride * 4);
        if (kTwoColumns) tile_store<3>(out + 16 * stride + 16, stride * 4);
    }
}

// The sums of a tile of linear layers, `rows` rows of packed rows times a panel of `words` units: [rows][32].

template <TileValues kValues, bool kTwoRows, Fetch kFetch>
INLINE void linear_sums(const uint32_t* a, size_t rows, const uint32_t* b, size_t words, const uint32_t* next,
                        void* sums) {
    zero_sums<kTwoRows, true>();
    size_t k = 0;
    for (; k + 16 <= words; k += 16, a += rows * 16, b += 16 * kPanel) {
        if (kFetch == kFetchOwn)
            for (int i = 0; i < 32; ++i) _mm_prefetch((const char*)(b + kTilesAhead * 16 * kPanel + i * 16), _MM_HINT_T0);
        if (kFetch == kFetchNext)
            for (int i = 0; i < 16; ++i, next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
        dot_tiles<kValues, kTwoRows, true, kFetch == kFetchOwn && !kTwoRows>(a, b, b + 16, kPanel);
    }
    if (k < words) {
        alignas(64) uint32_t rest[16 * kPanel] = {};  // another panel, or no memory, follows these words
        memcpy(rest, b, (words - k) * kPanel * 4);
        dot_tiles<kValues, kTwoRows, true>(a, rest, rest + 16, kPanel);
    }
    store_sums<kTwoRows, true>(sums, kPanel);
}

template <TileValues kValues, bool kTwoRows>
INLINE void linear_sums(const uint32_t* a, size_t rows, const uint32_t* b, size_t words, Fetch fetch,
                        const uint32_t* next, void* sums) {
    if (fetch == kFetchOwn)
        linear_sums<kValues, kTwoRows, kFetchOwn>(a, rows, b, words, next, sums);
    else if (fetch == kFetchNext)
        linear_sums<kValues, kTwoRows, kFetchNext>(a, rows, b, words, next, sums);
    else
        linear_sums<kValues, kTwoRows, kFetchNothing>(a, rows, b, words, next, sums);
}

template <TileValues kValues>
INLINE void linear_sums(Tiles<16>& tiles, const uint32_t* a, size_t rows, const uint32_t* b, size_t words, Fetch fetch,
                        const uint32_t* next, void* sums) {
    tiles.shape(int(rows));
    if (rows > 16)
        linear_sums<kValues, true>(a, rows, b, words, fetch, next, sums);
    else
        linear_sums<kValues, false>(a, rows, b, words, fetch, next, sums);
}
