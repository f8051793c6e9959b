// Matrix products y = x W^T + b with packed weights. Included inside a level's namespace; see level_*.cpp.
//
// Every output is one chain of `dot` over the words of its row, in order, from zero: the number of rows in the call,
// the tile a row falls into and the threads never change a bit of it.
//
// Packed weights: panels of 32 output columns, [ceil(N/32)][words][32] words, so that each thread reads its columns as
// one stream. Packed rows: tiles of at most kTileRows rows, [ceil(words/16)][rows][16] words, so that one pointer and
// constant offsets reach every row of a tile.

constexpr int kPanel = 32;
constexpr int NV = kPanel / W;  // vectors in a panel
constexpr int kTileRows = W == 16 ? 12 : 3;
constexpr int kAhead = 12;  // words of each column that are fetched before they are used

// What a tile asks the memory for while it computes: nothing; its own panel, a little ahead; or half of the next panel,
// into the second-level cache.
enum Fetch { kFetchNothing, kFetchOwn, kFetchNext };

// acc[r][c] += a[r] . b[c], where half of the panel is at b0 and half at b1 and a word row takes kStep words in each.
template <int MR, int kStep, Fetch kFetch>
INLINE void multiply(const uint32_t* a, const uint32_t* b0, const uint32_t* b1, size_t words, const uint32_t* next,
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

// How `rows` fall into tiles: the first `larger` tiles have one row more than the rest.
struct Tiling {
    size_t tiles, size, larger;
    explicit Tiling(size_t rows) {
        tiles = (rows + kTileRows - 1) / kTileRows;
        size = tiles ? rows / tiles : 0;
        larger = tiles ? rows % tiles : 0;
    }
    size_t start(size_t tile) const { return tile * size + (tile < larger ? tile : larger); }
    size_t rows(size_t tile) const { return size + (tile < larger); }
};

INLINE size_t word_count(size_t k) { return (k + kPerWord - 1) / kPerWord; }
INLINE size_t line_count(size_t k) { return (word_count(k) + 15) / 16; }

INLINE void pack_rows(const act* x, size_t stride, size_t rows, size_t k, uint32_t* out) {
    const size_t lines = line_count(k), per_line = 16 * kPerWord;
    for (size_t r = 0; r < rows; ++r)
        for (size_t i = 0; i < lines; ++i) {
            const size_t left = k - i * per_line;
            copy_line(out + (i * rows + r) * 16, x + r * stride + i * per_line, int(left < per_line ? left : per_line));
        }
}

enum Output { kAct, kFloat, kSiluMul };

struct Linear {
    const act* x;  // [T, K]
    size_t T, K;
    const uint32_t* weight;  // panels; for kSiluMul a panel is 16 gate columns, then the same 16 up columns
    const float* bias;       // [32 * panels] in panel order, or null
    size_t N;                // columns of `out`
    void* out;               // [T, N]
    int output;
};

INLINE F silu(F v);

template <int MR, Output kOutput>
INLINE void write_tile(const Linear& job, size_t row, size_t panel, F (&acc)[MR][NV]) {
    constexpr int kVectors = kOutput == kSiluMul ? NV / 2 : NV, kWidth = kVectors * W;
    const size_t column = panel * kWidth;
    const int left = int(job.N - column < size_t(kWidth) ? job.N - column : kWidth);
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < kVectors; ++c) {
            const size_t at = (row + r) * job.N + column + c * W;
            const int count = left - c * W;
            F v = acc[r][c];
            if (kOutput == kFloat) {
                if (count >= W)
                    store((float*)job.out + at, v);
                else if (count > 0)
                    store((float*)job.out + at, v, count);
                continue;
            }
            if (kOutput == kSiluMul)
                v = mul(act_round(silu(act_round(v))), act_round(acc[r][(c + kVectors) % NV]));
            if (count >= W)
                act_store((act*)job.out + at, v);
            else if (count > 0)
                act_store((act*)job.out + at, v, count);
        }
}

template <int MR>
INLINE void finish(const Linear& job, size_t row, size_t panel, F (&acc)[MR][NV]) {
    if (job.bias)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) {
            const F bias = load(job.bias + panel * kPanel + c * W);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) acc[r][c] = add(acc[r][c], bias);
        }
    if (job.output == kAct)
        write_tile<MR, kAct>(job, row, panel, acc);
    else if (job.output == kFloat)
        write_tile<MR, kFloat>(job, row, panel, acc);
    else
        write_tile<MR, kSiluMul>(job, row, panel, acc);
}

template <int MR>
void linear_tile(const Linear& job, const uint32_t* rows, size_t row, size_t panel, Fetch fetch, const uint32_t* next) {
    const size_t words = word_count(job.K);
    const uint32_t* b = job.weight + panel * words * kPanel;
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = zero();
    if (fetch == kFetchOwn)
        multiply<MR, kPanel, kFetchOwn>(rows, b, b + kPanel / 2, words, next, acc);
    else if (fetch == kFetchNext)
        multiply<MR, kPanel, kFetchNext>(rows, b, b + kPanel / 2, words, next, acc);
    else
        multiply<MR, kPanel, kFetchNothing>(rows, b, b + kPanel / 2, words, next, acc);
    finish<MR>(job, row, panel, acc);
}

using LinearTile = void (*)(const Linear&, const uint32_t*, size_t, size_t, Fetch, const uint32_t*);
#if defined(LEVEL_AVX2)
constexpr LinearTile kLinearTiles[] = {nullptr, linear_tile<1>, linear_tile<2>, linear_tile<3>};
#else
constexpr LinearTile kLinearTiles[] = {nullptr,        linear_tile<1>,  linear_tile<2>,  linear_tile<3>, linear_tile<4>,
                                       linear_tile<5>, linear_tile<6>,  linear_tile<7>,  linear_tile<8>, linear_tile<9>,
                                       linear_tile<10>, linear_tile<11>, linear_tile<12>};
#endif

// The panels of one range times all rows: rows in blocks that stay in the second-level cache, then panel by panel.
INLINE void linear_range(const Linear& job, const Tiling& tiling, const uint32_t* packed, size_t begin, size_t end) {
    const size_t words = word_count(job.K), row_words = line_count(job.K) * 16;
    size_t block = (384 << 10) / (row_words * 4 * kTileRows);
    if (block < 1) block = 1;
    for (size_t t0 = 0; t0 < tiling.tiles; t0 += block) {
        const size_t t1 = t0 + block < tiling.tiles ? t0 + block : tiling.tiles;
        for (size_t panel = begin; panel < end; ++panel)
            for (size_t t = t0; t < t1; ++t) {
                // While the first two tiles use this panel they fetch the next one, half each.
                Fetch fetch = kFetchNothing;
                const uint32_t* next = nullptr;
                if (t1 - t0 == 1 || (panel == begin && t == t0)) {
                    fetch = kFetchOwn;
                } else if (t - t0 < 2 && panel + 1 < end) {
                    fetch = kFetchNext;
                    next = job.weight + ((panel + 1) * 2 + (t - t0)) * words * 16;
                }
                const size_t row = tiling.start(t);
                kLinearTiles[tiling.rows(t)](job, packed + row * row_words, row, panel, fetch, next);
            }
    }
}

INLINE void linear(const Linear& job) {
    if (job.T == 0) return;
    const Tiling tiling(job.T);
    const size_t row_words = line_count(job.K) * 16;
    uint32_t* packed = (uint32_t*)quire::scratch(quire::kPackedRows, job.T * row_words * 4);
    quire::parallel_ranges(tiling.tiles, 8, [&](size_t begin, size_t end) {
        for (size_t t = begin; t < end; ++t)
            pack_rows(job.x + tiling.start(t) * job.K, job.K, tiling.rows(t), job.K,
                      packed + tiling.start(t) * row_words);
    });
    const size_t width = job.output == kSiluMul ? kPanel / 2 : kPanel;
    quire::parallel_ranges((job.N + width - 1) / width, 2,
                           [&](size_t begin, size_t end) { linear_range(job, tiling, packed, begin, end); });
}
