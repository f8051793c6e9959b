// Linear layers whose weights are integers of 4 bits with a multiplier per column and group of 32 values, for float
// activations. Included inside a level's namespace; see level_*.cpp.
//
// Rows of activations are bytes q, as in gemm_int.h. Weights w are stored as w + 8, and
//   y = float(sum over groups of multiplier * (sum over the group of w * q)) * row scale * column scale + bias.
// The sum of a group fits 16 bits, and the whole sum 32 bits (`group_multipliers` in quantization.py), so that integers
// are exact and every level has the same bits. Few rows: the sum of each group is multiplied. Many rows on tiles:
// multiplier * w has 16 bits and becomes a plane of low bytes and one of high bytes, with a sum each.

constexpr size_t kGroup = 32;
constexpr int kGroupWords = kPanel / 2 + 4 * kPanel;  // of a panel: multipliers and units

INLINE size_t group_count(size_t k) { return (k + kGroup - 1) / kGroup; }

#if defined(LEVEL_VNNI)

// Sums of products with unsigned values of 4 bits in 32 bits, from an offset on.
INLINE I add_nibbles(I sums, I nibbles, I x) { return add_dot_int8(sums, nibbles, x); }
INLINE int32_t first_sum(int offset) { return -offset; }

// The multipliers of 16 columns, and sums + group * multipliers, where `group` has values of 16 bits.
INLINE I load_multipliers(const uint32_t* p) { return load_uint16(p); }
INLINE I add_multiplied(I sums, I group, I multipliers) { return add_dot_int16(sums, group, multipliers); }

#else

// The same with two sums of 16 bits per column. Additions wrap around, but the sums of a whole group are in range.
INLINE I add_nibbles(I sums, I nibbles, I x) { return add_int16(sums, dot_int8(nibbles, x)); }
INLINE int32_t first_sum(int offset) { return -offset & 0xffff; }
INLINE I load_multipliers(const uint32_t* p) { return twice_uint16(p); }
INLINE I add_multiplied(I sums, I group, I multipliers) { return int_add(sums, dot_int16(group, multipliers)); }

#endif

template <int MR>
void nibble_rows(const Linear& job, const PackedRows& rows, const uint32_t* a, size_t row, size_t panel,
                 const uint32_t* b, Fetch fetch, const uint32_t* next) {
    const size_t groups = group_count(job.K);
    const uint32_t* offsets = (const uint32_t*)rows.offsets + row * groups;
    const I low = int_set1(0x0f0f0f0f);
    I total[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) total[r][c] = int_zero();
    for (size_t g = 0; g < groups; ++g, b += kGroupWords) {
        const uint32_t *x = a + g / 2 * MR * 16 + g % 2 * 8, *units = b + kPanel / 2;
        if (fetch == kFetchOwn) {
#pragma GCC unroll 16
            for (int i = 0; i < 9; ++i) _mm_prefetch((const char*)(b + 3 * kGroupWords + i * 16), _MM_HINT_T0);
        } else if (fetch == kFetchNext) {
#pragma GCC unroll 8
            for (int i = 0; i < 5; ++i, next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int c = 0; c < NV; ++c) {
            I acc[MR];
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) acc[r] = int_broadcast(offsets + r * groups + g);
#pragma GCC unroll 4
            for (int u = 0; u < 4; ++u) {
                const I w = int_load(units + u * kPanel + c * W);
                const I first = int_and(w, low), second = int_and(shift_right_4(w), low);
#pragma GCC unroll 16
                for (int r = 0; r < MR; ++r) {
                    acc[r] = add_nibbles(acc[r], first, int_broadcast(x + r * 16 + 2 * u));
                    acc[r] = add_nibbles(acc[r], second, int_broadcast(x + r * 16 + 2 * u + 1));
                }
            }
            const I multipliers = load_multipliers(b + c * W / 2);
#pragma GCC unroll 16
            for (int r = 0; r < MR; ++r) total[r][c] = add_multiplied(total[r][c], acc[r], multipliers);
        }
    }
    finish_sums<MR>(job, rows, row, panel, total);
}

#if defined(LEVEL_TILES)

constexpr int kPlaneWords = 16 * 16;                     // 16 words of 16 columns
constexpr size_t kLinePlanes = 2 * 2 * kPlaneWords;      // the planes of two groups: [column half][low, high]

// Writes the planes of half of the columns of two groups, or of one and zeros.
INLINE void expand_groups(const uint32_t* b, int half, bool has_second, uint32_t* planes) {
    const I low_byte = int_set1(0x00ff00ff), nibble = int_set1(0x000f000f);
    for (int g = 0; g < 2; ++g, b += kGroupWords) {
        uint32_t* out = planes + g * 8 * W;
        if (g && !has_second) {
            for (int i = 0; i < 8; ++i) {
                _mm512_store_si512(out + i * W, int_zero());
                _mm512_store_si512(out + kPlaneWords + i * W, int_zero());
            }
            return;
        }
        const I multipliers = twice_uint16(b + half * W / 2), eight = _mm512_slli_epi16(multipliers, 3);
        const auto write = [&](I even, I odd) {  // values 0 and 2 of each column, 1 and 3
            even = _mm512_sub_epi16(_mm512_mullo_epi16(even, multipliers), eight);
            odd = _mm512_sub_epi16(_mm512_mullo_epi16(odd, multipliers), eight);
            constexpr int kChoose = 0xca;  // bits of the second operand where the first has ones, else of the third
            _mm512_store_si512(out, _mm512_ternarylogic_epi32(low_byte, even, _mm512_slli_epi16(odd, 8), kChoose));
            _mm512_store_si512(out + kPlaneWords,
                               _mm512_ternarylogic_epi32(low_byte, _mm512_srli_epi16(even, 8), odd, kChoose));
            out += W;
        };
        for (int u = 0; u < 4; ++u) {
            const I w = int_load(b + kPanel / 2 + u * kPanel + half * W);
            write(int_and(w, nibble), int_and(_mm512_srli_epi16(w, 8), nibble));
            write(int_and(_mm512_srli_epi16(w, 4), nibble), _mm512_srli_epi16(w, 12));
        }
    }
}

// Adds the products of a line of packed rows and the planes of its two groups: tiles 0 and 2 have the sums of the low
// bytes, 1 and 3 those of the high bytes.
template <bool kTwoRows>
INLINE void dot_planes(const uint32_t* a, const uint32_t* planes) {
    tile_load<6>(planes, 64);
    tile_load<4>(a, 64);
    tile_dot<kBytes, 0, 4, 6>();
    tile_load<7>(planes + kPlaneWords, 64);
    tile_dot<kSignedBytes, 1, 4, 7>();
    if (kTwoRows) {
        tile_load<5>(a + 16 * 16, 64);
        tile_dot<kBytes, 2, 5, 6>();
        tile_dot<kSignedBytes, 3, 5, 7>();
    }
}

// Computes up to 32 rows of a panel. planes: of the panel (`NibbleFormat::expand`), or null: they are made from `b`.
template <bool kTwoRows>
INLINE void plane_rows(const Linear& job, const PackedRows& rows, const uint32_t* a, size_t row, size_t count,
                       size_t panel, const uint32_t* b, const uint32_t* planes, const uint32_t* next) {
    alignas(64) uint32_t sums[2][32 * kPanel];
    const size_t groups = group_count(job.K), lines = (groups + 1) / 2;
    for (int half = 0; half < 2; ++half) {
        zero_sums<kTwoRows, true>();
        for (size_t i = 0; i < lines; ++i) {
            const uint32_t* line = a + i * count * 16;
            if (planes) {
                dot_planes<kTwoRows>(line, planes + i * kLinePlanes + half * 2 * kPlaneWords);
                continue;
            }
            const uint32_t* at = b + i * 2 * kGroupWords;
            if (half == 0)
                for (int j = 0; j < 18; ++j) _mm_prefetch((const char*)(at + 4 * kGroupWords + j * 16), _MM_HINT_T0);
            for (int j = 0; j < 9; ++j, next += 16) _mm_prefetch((const char*)next, _MM_HINT_T1);
            alignas(64) uint32_t made[4][2 * kPlaneWords];
            expand_groups(at, half, 2 * i + 1 < groups, made[i % 4]);
            dot_planes<kTwoRows>(line, made[i % 4]);
        }
        store_sums<kTwoRows, true>(sums[half], kPanel);
    }
    for (size_t r = 0; r < count; ++r) {
        I total[1][NV];
        for (int c = 0; c < NV; ++c) {
            const I high = int_load(sums[c] + r * kPanel + W);
            total[0][c] = int_add(int_load(sums[c] + r * kPanel), _mm512_slli_epi32(high, 8));
        }
        finish_sums<1>(job, rows, row + r, panel, total);
    }
}

#endif

struct NibbleFormat {
#if defined(LEVEL_TILES)
    static constexpr int kTile = 32;
    static constexpr bool kExpands = true;
    using State = Tiles<16>;
#else
    static constexpr int kTile = kTileRows;
    static constexpr bool kExpands = false;
    struct State {};
#endif

    INLINE size_t panel_words(size_t k) { return group_count(k) * kGroupWords; }
    INLINE size_t row_words(size_t k) { return (group_count(k) + 1) / 2 * 16; }
    INLINE size_t row_offsets(size_t k) { return group_count(k); }

    INLINE void pack(const Linear& job, const Tiling& tiling, size_t row, const PackedRows& rows) {
        const float* x = job.x + row * job.K;
        const RowScale scale = row_scale(x, job.K);
        const RowPlace place(tiling, row, row_words(job.K) / 16, rows.words);
        uint32_t* out = place.line;
        for (size_t g = 0, groups = group_count(job.K); g < groups; ++g) {
            const I q0 = quantise(x, g * kGroup, job.K, scale.inverse);
            const I q1 = quantise(x, g * kGroup + W, job.K, scale.inverse);
            store_bytes(out + g % 2 * 8, q0);
            store_bytes(out + g % 2 * 8 + 4, q1);
            rows.offsets[row * groups + g] = first_sum(8 * int_sum(int_add(q0, q1)));
            if (g % 2) out += place.step;
        }
        rows.scales[row] = scale.scale;
    }

    INLINE void tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count, size_t panel,
                     const uint32_t* b, Fetch fetch, const uint32_t* next) {
        const uint32_t* a = rows.words + row * row_words(job.K);
#if defined(LEVEL_TILES)
        if (count > size_t(kTileRows)) return plane_tile(job, state, rows, row, count, panel, b, nullptr);
#endif
        (void)state;
        static constexpr IntRows kRows[] = FOR_TILE_ROWS(nibble_rows);
        kRows[count](job, rows, a, row, panel, b, fetch, next);
    }

#if defined(LEVEL_TILES)
    INLINE size_t expanded_bytes(size_t k) { return (group_count(k) + 1) / 2 * kLinePlanes * 4; }

    INLINE void expand(const uint32_t* b, size_t k, uint32_t* planes) {
        for (size_t g = 0, groups = group_count(k); g < groups; g += 2, b += 2 * kGroupWords, planes += kLinePlanes) {
            for (int i = 0; i < 18; ++i) _mm_prefetch((const char*)(b + 4 * kGroupWords + i * 16), _MM_HINT_T0);
            expand_groups(b, 0, g + 1 < groups, planes);
            expand_groups(b, 1, g + 1 < groups, planes + 2 * kPlaneWords);
        }
    }

    // Computes a tile of a panel that `expand` wrote.
    INLINE void expanded_tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count,
                              size_t panel, const uint32_t* planes, Fetch, const uint32_t*) {
        plane_tile(job, state, rows, row, count, panel, nullptr, planes);
    }

  private:
    INLINE void plane_tile(const Linear& job, State& state, const PackedRows& rows, size_t row, size_t count,
                           size_t panel, const uint32_t* b, const uint32_t* planes) {
        const uint32_t *a = rows.words + row * row_words(job.K), *next = b + panel_words(job.K);
        state.shape(int(count));
        if (count > 16)
            plane_rows<true>(job, rows, a, row, count, panel, b, planes, next);
        else
            plane_rows<false>(job, rows, a, row, count, panel, b, planes, next);
    }
#endif
};
