// The inner loops of linear layers on AMX tiles, for bf16 activations. Included inside a level's namespace; see
// level_*.cpp.

// Linear layers

// A format of packed weights, as linear.h uses it: the words of activations.
struct WordFormat {
    static constexpr int kTile = kTileRows;
    static constexpr bool kExpands = false;
    using State = Tiles<16>;

    INLINE size_t panel_words(size_t k) { return word_count(k) * kPanel; }
    INLINE size_t row_words(size_t k) { return line_count(k) * 16; }
    INLINE size_t row_offsets(size_t) { return 0; }

    INLINE void pack(const Linear& job, const Tiling& tiling, size_t row, const PackedRows& rows) {
        pack_row(tiling, row, job.x + row * job.K, job.K, rows.words);
    }

    INLINE void tile(const Linear& job, State& tiles, const PackedRows& rows, size_t row, size_t count,
                            size_t panel, const uint32_t* b, Fetch fetch, const uint32_t* next) {
        alignas(64) float sums[kTile * kPanel];
        const uint32_t* a = rows.words + row * row_words(job.K);
        linear_sums<kBf16Pairs>(tiles, a, count, b, word_count(job.K), fetch, next, sums);
        for (size_t r = 0; r < count; ++r) {
            F acc[1][NV];
            for (int c = 0; c < NV; ++c) acc[0][c] = load(sums + r * kPanel + c * W);
            finish<1>(job, row + r, panel, acc);
        }
    }
};
