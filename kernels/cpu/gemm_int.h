// Linear layers whose weights are integers of 8 bits, for float activations, and the rounding of rows for 4 bits
// (gemm_int4.h). Included inside a level's namespace; see level_*.cpp.
//
// Each row of activations is rounded to signed bytes: scale = max |x| / 127 and q = x / scale, rounded to even. Sums of
// products of integers are exact, so that every level gives the same bits whatever the order. Weights are unsigned:
// a weight w is stored as w + 128, and the sum of (w + 128) * q is too large by 128 * sum(q), the offset of the row. Then
//   y = float(sum over K) * row scale * column scale + bias, and K is at most 2^17, for the sum to fit 32 bits.
// A row whose largest value is below 2^-100 counts as zero. A row with NaN or infinity gives NaN.

#if defined(LEVEL_VNNI)

// The bytes of a vector of weights, ready for products with the words of packed rows: kByteWords words for 4 values.
using Bytes = I;
constexpr int kByteWords = 1;
INLINE Bytes bytes_load(const uint32_t* p) { return int_load(p); }
INLINE I add_dot(I sums, Bytes weights, const uint32_t* x) { return add_dot_int8(sums, weights, int_broadcast(x)); }

#else

// A product of bytes with sums of 16 bits would saturate, so that the bytes become 16-bit integers: those with even and
// those with odd indices. A packed row has its values in the same order, 0, 2, 1, 3, with 16 bits each.
struct Bytes {
    I even, odd;
};
constexpr int kByteWords = 2;
INLINE Bytes bytes_load(const uint32_t* p) {
    const I v = int_load(p);
    return {int_and(v, int_set1(0x00ff00ff)), odd_bytes(v)};
}
INLINE I add_dot(I sums, Bytes weights, const uint32_t* x) {
    const I first = int_add(sums, dot_int16(weights.even, int_broadcast(x)));
    return int_add(first, dot_int16(weights.odd, int_broadcast(x + 1)));
}

#endif

// Stores 16 integers of at most 8 bits as bytes, 4 words.
INLINE void store_bytes(uint32_t* to, I values) {
    const __m256i v = int16_of(values);
    _mm_storeu_si128((__m128i*)to, _mm_packs_epi16(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}

// Stores 16 integers of at most 8 bits as add_dot reads them, 4 * kByteWords words.
INLINE void store_row_bytes(uint32_t* to, I values) {
    if (kByteWords == 1) return store_bytes(to, values);
    const __m256i v = _mm256_shufflelo_epi16(int16_of(values), _MM_SHUFFLE(3, 1, 2, 0));
    _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(v, _MM_SHUFFLE(3, 1, 2, 0)));
}

// The scale of a row and its inverse. Both are zero for a row that counts as zero, and the scale of a row with NaN or
// infinity is NaN.
struct RowScale {
    float scale, inverse;
};

INLINE RowScale row_scale(const float* x, size_t k) {
    I largest = int_zero();
    const I magnitude = int_set1(0x7fffffff);
    size_t i = 0;
    for (; i + W <= k; i += W) largest = int_max(largest, int_and(bits_of(load(x + i)), magnitude));
    if (i < k) largest = int_max(largest, int_and(bits_of(load(x + i, int(k - i))), magnitude));
    const int32_t bits = int_max_of(largest);  // positive floats have the order of their bits
    if (bits >= 0x7f800000) return {__builtin_nanf(""), 0.f};
    float value;
    memcpy(&value, &bits, sizeof value);
    return value < 0x1p-100f ? RowScale{0.f, 0.f} : RowScale{value / 127.f, 127.f / value};
}

INLINE I quantise(const float* x, size_t i, size_t k, float inverse) {
    if (i >= k || inverse == 0.f) return int_zero();
    const int left = k - i < size_t(W) ? int(k - i) : W;
    return round_to_int(mul(left < W ? load(x + i, left) : load(x + i), set1(inverse)));
}

// 8 bits

template <int MR, Fetch kFetch>
INLINE void byte_sums(const uint32_t* a, const uint32_t* b, size_t units, const uint32_t* next, I (&acc)[MR][NV]) {
    constexpr size_t kLineUnits = 16 / kByteWords;
    for (size_t k0 = 0; k0 < units; k0 += kLineUnits, a += MR * 16) {
        const size_t n = units - k0 < kLineUnits ? units - k0 : kLineUnits;
        for (size_t k = 0; k < n; ++k, b += kPanel) {
            if (kFetch == kFetchOwn) {
                _mm_prefetch((const char*)(b + kAhead * kPanel), _MM_HINT_T0);
                _mm_prefetch((const char*)(b + kAhead * kPanel + 16), _MM_HINT_T0);
            } else if (kFetch == kFetchNext) {
                _mm_prefetch((const char*)next, _MM_HINT_T1);
                next += 16;
            }
#pragma GCC unroll 8
            for (int c = 0; c < NV; ++c) {
                const Bytes w = bytes_load(b + c * W);
#pragma GCC unroll 16
                for (int r = 0; r < MR; ++r) acc[r][c] = add_dot(acc[r][c], w, a + r * 16 + k * kByteWords);
            }
        }
    }
}

// Writes rows of sums of integers. `too_much` is in the sums of each row.
template <int MR>
INLINE void finish_sums(const Linear& job, const PackedRows& rows, size_t row, size_t panel, const I (&sums)[MR][NV],
                        const int32_t* too_much = nullptr) {
    F acc[MR][NV];
#pragma GCC unroll 8
    for (int c = 0; c < NV; ++c) {
        const F scale = load(job.weights.scales + panel * kPanel + c * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
            const F exact = to_float(too_much ? int_sub(sums[r][c], int_set1(too_much[r])) : sums[r][c]);
            acc[r][c] = mul(mul(exact, set1(rows.scales[row + r])), scale);
        }
    }
    finish<MR>(job, row, panel, acc);
}

template <int MR>
void byte_rows(const Linear& job, const PackedRows& rows, const uint32_t* a, size_t row, size_t panel,
               const uint32_t* b, Fetch fetch, const uint32_t* next) {
    I acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) acc[r][c] = int_zero();
    const size_t units = (job.K + 3) / 4;
    if (fetch == kFetchOwn)
        byte_sums<MR, kFetchOwn>(a, b, units, next, acc);
    else if (fetch == kFetchNext)
        byte_sums<MR, kFetchNext>(a, b, units, next, acc);
    else
        byte_sums<MR, kFetchNothing>(a, b, units, next, acc);
    finish_sums<MR>(job, rows, row, panel, acc, rows.offsets + row);
}

using IntRows = void (*)(const Linear&, const PackedRows&, const uint32_t*, size_t, size_t, const uint32_t*, Fetch,
                         const uint32_t*);

struct ByteFormat {
    static constexpr bool kExpands = false;
#if defined(LEVEL_TILES)
    static constexpr int kTile = 32;
    using State = Tiles<16>;
#else
    static constexpr int kTile = kTileRows;
    struct State {};
#endif

    INLINE size_t panel_words(size_t k) { return (k + 3) / 4 * kPanel; }
    INLINE size_t row_words(size_t k) { return ((k + 3) / 4 * kByteWords + 15) / 16 * 16; }
    INLINE size_t row_offsets(size_t) { return 1; }

    INLINE void pack(const Linear& job, const Tiling& tiling, size_t row, const PackedRows& rows) {
        const float* x = job.x + row * job.K;
        const RowScale scale = row_scale(x, job.K);
        const RowPlace place(tiling, row, row_words(job.K) / 16, rows.words);
        uint32_t* out = place.line;
        I sums = int_zero();
        constexpr size_t kLineValues = 64 / kByteWords;
        for (size_t i = 0; i < row_words(job.K) * 4 / kByteWords; i += kLineValues, out += place.step)
            for (size_t j = 0; j < kLineValues; j += W) {
                const I q = quantise(x, i + j, job.K, scale.inverse);
                sums = int_add(sums, q);
                store_row_bytes(out + j / 4 * kByteWords, q);
            }
        rows.scales[row] = scale.scale;
        rows.offsets[row] = 128 * int_sum(sums);
    }

    INLINE void tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count, size_t panel,
                     const uint32_t* b, Fetch fetch, const uint32_t* next) {
        const uint32_t* a = rows.words + row * row_words(job.K);
#if defined(LEVEL_TILES)
        if (count <= 3) {  // which would fill few rows of a tile register
            static constexpr IntRows kRows[] = FOR_3_ROWS(byte_rows);
            return kRows[count](job, rows, a, row, panel, b, fetch, next);
        }
        alignas(64) int32_t sums[kTile * kPanel];
        linear_sums<kBytes>(state, a, count, b, (job.K + 3) / 4, fetch, next, sums);
        for (size_t r = 0; r < count; ++r) {
            I acc[1][NV];
            for (int c = 0; c < NV; ++c) acc[0][c] = int_load(sums + r * kPanel + c * W);
            finish_sums<1>(job, rows, row + r, panel, acc, rows.offsets + row + r);
        }
#else
        (void)state;
        static constexpr IntRows kRows[] = FOR_TILE_ROWS(byte_rows);
        kRows[count](job, rows, a, row, panel, b, fetch, next);
#endif
    }
};
