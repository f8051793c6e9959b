// The outer loops of a linear layer. Included inside a level's namespace; see level_*.cpp.

// Computes the columns of the panels [begin, end) for all rows: block by block of rows that fit into the second-level
// cache, and panel by panel within a block.
INLINE void linear_range(const Linear& job, const Tiling& tiling, const uint32_t* packed, size_t begin, size_t end) {
    const size_t words = word_count(job.K), row_words = line_count(job.K) * 16;
    LinearState state;
    size_t block = (384 << 10) / (row_words * 4 * kTileRows);
    if (block < 1) block = 1;
    for (size_t t0 = 0; t0 < tiling.tiles; t0 += block) {
        const size_t t1 = t0 + block < tiling.tiles ? t0 + block : tiling.tiles;
        for (size_t panel = begin; panel < end; ++panel)
            for (size_t t = t0; t < t1; ++t) {
                // The first two tiles that use this panel prefetch the next one, half each.
                Fetch fetch = kFetchNothing;
                const uint32_t* next = nullptr;
                if (t1 - t0 == 1 || (panel == begin && t == t0)) {
                    fetch = kFetchOwn;
                } else if (t - t0 < 2 && panel + 1 < end) {
                    fetch = kFetchNext;
                    next = job.weight + ((panel + 1) * 2 + (t - t0)) * words * 16;
                }
                const size_t row = tiling.start(t);
                linear_tile(job, state, packed + row * row_words, row, tiling.rows(t), panel, fetch, next);
            }
    }
}

INLINE void linear(const Linear& job) {
    if (job.T == 0) return;
    const Tiling tiling(job.T);
    const size_t row_words = line_count(job.K) * 16;
    uint32_t* packed = (uint32_t*)quire::scratch(quire::kPackedRows, job.T * row_words * 4);
    quire::parallel_ranges(job.T, 1 + (8 << 10) / row_words, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) pack_row(tiling, row, job.x + row * job.K, job.K, packed);
    });
    const size_t width = job.output == kSiluMul ? kPanel / 2 : kPanel;
    quire::parallel_ranges((job.N + width - 1) / width, 2,
                           [&](size_t begin, size_t end) { linear_range(job, tiling, packed, begin, end); });
}
