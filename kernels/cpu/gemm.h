// Matrix multiplication y = x W^T + b with packed weights: layouts, and the output of a tile. gemm_simd.h and
// gemm_amx.h have the inner loops, linear.h the outer ones. Included inside a level's namespace; see level_*.cpp.
//
// Each output is one chain of products over the words of its row, in order, from zero. The number of rows in the call,
// the tile of a row and the number of threads never change a bit of it.
//
// Packed weights: panels of 32 output columns, [ceil(N/32)][words][32] words, so that each thread reads its columns as
// one stream. Packed rows: tiles of at most kTileRows rows, [ceil(words/16)][rows][16] words, so that one pointer and
// constant offsets reach every row of a tile.

constexpr int kPanel = 32;
constexpr int NV = kPanel / W;  // vectors in a panel
#if defined(LEVEL_AMX)
constexpr int kTileRows = 32, kWeighRows = 32;  // rows of a tile: of linear layers and scores; of weights times values
#else
constexpr int kTileRows = W == 16 ? 12 : 3, kWeighRows = W == 16 ? 6 : 2;
#endif
constexpr int kUnitWords = 16 / kPerWord;  // words of one column of the values of 16 keys

// The memory that a tile prefetches while it computes: nothing; its own panel, a little ahead; or half of the next
// panel, into the second-level cache.
enum Fetch { kFetchNothing, kFetchOwn, kFetchNext };

// The division of `rows` into tiles of at most `most`. The first `larger` tiles have one row more than the rest.
struct Tiling {
    size_t tiles, size, larger;
    explicit Tiling(size_t rows, size_t most = kTileRows) {
        tiles = (rows + most - 1) / most;
        size = tiles ? rows / tiles : 0;
        larger = tiles ? rows % tiles : 0;
    }
    size_t start(size_t tile) const { return tile * size + (tile < larger ? tile : larger); }
    size_t rows(size_t tile) const { return size + (tile < larger); }
    size_t tile_of(size_t row) const {
        const size_t in_larger = larger * (size + 1);
        return row < in_larger ? row / (size + 1) : larger + (row - in_larger) / size;
    }
};

INLINE size_t word_count(size_t k) { return (k + kPerWord - 1) / kPerWord; }
INLINE size_t line_count(size_t k) { return (word_count(k) + 15) / 16; }

// Packs one row, padded with zeros, into the tiles at `out`.
INLINE void pack_row(const Tiling& tiling, size_t row, const act* x, size_t k, uint32_t* out) {
    const size_t lines = line_count(k), per_line = 16 * kPerWord, tile = tiling.tile_of(row);
    const size_t start = tiling.start(tile), rows = tiling.rows(tile);
    out += (start * lines + row - start) * 16;
    for (size_t i = 0; i < lines; ++i, x += per_line, out += rows * 16) {
        const size_t left = k - i * per_line;
        copy_line(out, x, int(left < per_line ? left : per_line));
    }
}

enum Output { kAct, kFloat, kSiluMul };

struct Linear {
    const act* x;  // [T, K]
    size_t T, K;
    const uint32_t* weight;  // panels; for kSiluMul a panel has 16 gate columns and then the same 16 up columns
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
