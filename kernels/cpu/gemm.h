// Matrix multiplication y = x W^T + b with packed weights: layouts, and the output of a tile. gemm_simd.h, gemm_int.h and
// gemm_amx.h have the inner loops, linear.h the outer ones. Included inside a level's namespace; see level_*.cpp.
//
// Each output is one chain of products over its row, in order, from zero. The number of rows in the call, the tile of a
// row and the number of threads never change a bit of it.
//
// Packed weights: panels of 32 output columns, so that each thread reads its columns as one stream. A panel consists of
// units of 128 bytes, [32 columns][4 bytes], and `Format` says what a unit holds:
//   kWords:    one word of each column: a float, or for bf16 activations two bf16 values;
//   kBfloat16: two bf16 values of each column, for float activations (the layout of kWords with bf16 activations);
//   kFloat16:  two f16 values of each column, as [2][32 columns], for float activations;
//   kInt8:     four values of each column, each the weight + 128 as an unsigned byte;
//   kInt4:     eight values of each column, each the weight + 8 as four unsigned bits. A unit has the first four values
//              in the low halves of its bytes and the next four in the high halves. The 32 values of a group make four
//              units, and before them are the multipliers of the group, one int16 per column;
//   kUint4, kMxfp4, kFp8, kUint8, kNf4, kFp4, kSint8: codes with a header per group of 32 values, see gemm_grouped.h;
//   kKQuant4, kKQuant6: codes of 4 and 6 bits with headers per 256, 32 and 16 values, see gemm_grouped.h;
//   kNvfp4: codes of 4 bits with a scale per column and one per 16 values, see gemm_grouped.h.
//
// Packed rows: tiles of at most kTileRows rows, [ceil(words/16)][rows][16] words, so that one pointer and constant
// offsets reach every row of a tile.

constexpr int kPanel = 32;
constexpr int NV = kPanel / W;  // vectors in a panel
// The rows of a tile: of linear layers and scores; of weights times values. The sums of a tile fill the registers.
#if defined(LEVEL_AMX)
constexpr int kTileRows = 32, kWeighRows = 32;
#elif defined(LEVEL_AVX2)
constexpr int kTileRows = 3, kWeighRows = 3;
#else
constexpr int kTileRows = 12, kWeighRows = 6;
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

// The place of a row in the packed rows: its first line of 16 words, and the distance of its lines in words.
struct RowPlace {
    uint32_t* line;
    size_t step;
    RowPlace(const Tiling& tiling, size_t row, size_t lines, uint32_t* rows) {
        const size_t tile = tiling.tile_of(row), start = tiling.start(tile);
        line = rows + (start * lines + row - start) * 16;
        step = tiling.rows(tile) * 16;
    }
};

// Packs one row, padded with zeros, into the tiles at `out`.
INLINE void pack_row(const Tiling& tiling, size_t row, const act* x, size_t k, uint32_t* out) {
    const size_t lines = line_count(k), per_line = 16 * kPerWord;
    const RowPlace place(tiling, row, lines, out);
    out = place.line;
    for (size_t i = 0; i < lines; ++i, x += per_line, out += place.step) {
        const size_t left = k - i * per_line;
        copy_line(out, x, int(left < per_line ? left : per_line));
    }
}

// kSiluMul and later: gates and ups of a gated MLP, as `gated` combines them.
enum Output { kAct, kFloat, kSiluMul, kGeluMul, kClampedMul };
enum Format {
    kWords, kBfloat16, kFloat16, kInt8, kInt4, kUint4, kMxfp4, kFp8, kUint8, kKQuant4, kKQuant6, kNf4, kFp4, kSint8, kNvfp4
};

// The packed weights of a linear layer. `Weights` in linear.py has the same fields in the same order.
struct Weights {
    const uint32_t* panels;  // for a gated MLP a panel has 16 gate columns and then the same 16 up columns
    const float* bias;       // [32 * panels] in panel order, or null
    const float* scales;     // kInt8 and kInt4: [32 * panels], the scale of each column; else null
    const int32_t* order;    // formats of gemm_grouped.h: [K], the input feature of each value of a column, or null
    int64_t format;
};

// The packed rows of one call. Only rows of integers have scales and offsets.
struct PackedRows {
    uint32_t* words;
    float* scales;     // [T]
    int32_t* offsets;  // kInt8: [T]; kInt4: [T][groups]; corrections of the sums of products, see gemm_int.h
};

struct Linear {
    const act* x;  // [T, K]
    size_t T, K;
    Weights weights;
    size_t N;   // columns of `out`
    void* out;  // [T, N]
    int output;
};

INLINE F silu(F v);
INLINE F gelu_tanh(F v);
INLINE F clamped_gate(F gate, F up);

// The output of a gated MLP before its second product.
INLINE F gated(int output, F gate, F up) {
    if (output == kClampedMul) return clamped_gate(gate, up);
    return mul(act_round(output == kSiluMul ? silu(gate) : gelu_tanh(gate)), up);
}

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
                v = gated(job.output, act_round(v), act_round(acc[r][(c + kVectors) % NV]));
            if (count >= W)
                act_store((act*)job.out + at, v);
            else if (count > 0)
                act_store((act*)job.out + at, v, count);
        }
}

template <int MR>
INLINE void finish(const Linear& job, size_t row, size_t panel, F (&acc)[MR][NV]) {
    if (job.weights.bias)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) {
            const F bias = load(job.weights.bias + panel * kPanel + c * W);
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
