// The outer loops of a linear layer, for each format of weights. Included inside a level's namespace; see level_*.cpp.

// Computes the columns of the panels [begin, end) for all rows: block by block of rows that fit into the second-level
// cache, and panel by panel within a block.
template <class Format>
INLINE void linear_range(const Linear& job, const Tiling& tiling, const PackedRows& rows, size_t begin, size_t end) {
    const size_t panel_words = Format::panel_words(job.K);
    typename Format::State state;
    size_t block = (384 << 10) / (Format::row_words(job.K) * 4 * Format::kTile);
    // A panel that is expanded is used by several tiles.
    constexpr size_t kLeast = Format::kExpands ? 4 : 1;
    if (block < kLeast) block = kLeast;
    for (size_t t0 = 0; t0 < tiling.tiles; t0 += block) {
        const size_t t1 = t0 + block < tiling.tiles ? t0 + block : tiling.tiles;
        for (size_t panel = begin; panel < end; ++panel) {
            const uint32_t* b = job.weights.panels + panel * panel_words;
            if constexpr (Format::kExpands) {
                if (t1 - t0 > 1) {
                    auto* expanded = (uint32_t*)quire::scratch(quire::kTile, Format::expanded_bytes(job.K));
                    Format::expand(b, job.K, expanded);
                    for (size_t t = t0; t < t1; ++t) {
                        // The first tile prefetches the next panel.
                        const bool fetches = t == t0 && panel + 1 < end;
                        Format::expanded_tile(job, state, rows, tiling.start(t), tiling.rows(t), panel, expanded,
                                              fetches ? kFetchNext : kFetchNothing, b + panel_words);
                    }
                    continue;
                }
            }
            for (size_t t = t0; t < t1; ++t) {
                // The first two tiles that use this panel prefetch the next one, half each.
                Fetch fetch = kFetchNothing;
                const uint32_t* next = nullptr;
                if (t1 - t0 == 1 || (panel == begin && t == t0)) {
                    fetch = kFetchOwn;
                } else if (t - t0 < 2 && panel + 1 < end) {
                    fetch = kFetchNext;
                    next = b + panel_words + (t - t0) * panel_words / 2;
                }
                Format::tile(job, state, rows, tiling.start(t), tiling.rows(t), panel, b, fetch, next);
            }
        }
    }
}

template <class Format>
void linear_of(const Linear& job) {
    const Tiling tiling(job.T, Format::kTile);
    const size_t row_words = Format::row_words(job.K), offsets = Format::row_offsets(job.K);
    PackedRows rows;
    rows.words = (uint32_t*)quire::scratch(quire::kPackedRows, job.T * (row_words + 1 + offsets) * 4);
    rows.scales = (float*)(rows.words + job.T * row_words);
    rows.offsets = (int32_t*)(rows.scales + job.T);
    quire::parallel_ranges(job.T, 1 + (8 << 10) / row_words, [&](size_t begin, size_t end) {
        for (size_t row = begin; row < end; ++row) Format::pack(job, tiling, row, rows);
    });
    const size_t width = job.output >= kSiluMul ? kPanel / 2 : kPanel;
    quire::parallel_ranges((job.N + width - 1) / width, 2,
                           [&](size_t begin, size_t end) { linear_range<Format>(job, tiling, rows, begin, end); });
}

#define INSTANCE_OF_LINEAR(Format) INSTANCE void linear_of<Format>(const Linear&);
EACH_FORMAT(INSTANCE_OF_LINEAR)

// Calls run(Format()) for the format of weights.
template <class Run>
INLINE void with_format(int64_t format, Run run) {
#ifndef ACT_BF16
    switch (format) {
        case kBfloat16: return run(HalfFormat<Bfloat16Unit>());
        case kFloat16: return run(HalfFormat<Float16Unit>());
        case kInt8: return run(ByteFormat());
        case kInt4: return run(NibbleFormat());
    }
#endif
    switch (format) {
        case kUint4: return run(GroupedFormat<Groups<Uint4Codes>>());
        case kMxfp4: return run(GroupedFormat<Groups<Mxfp4Codes>>());
        case kFp8: return run(GroupedFormat<Groups<Fp8Codes>>());
        case kUint8: return run(GroupedFormat<Groups<Uint8Codes>>());
        case kKQuant4: return run(GroupedFormat<KQuants<4>>());
        case kKQuant6: return run(GroupedFormat<KQuants<6>>());
        case kNf4: return run(GroupedFormat<Groups<TableCodes<Nf4>>>());
        case kFp4: return run(GroupedFormat<Groups<TableCodes<Fp4>>>());
        case kSint8: return run(GroupedFormat<Groups<Sint8Codes>>());
        case kNvfp4: return run(GroupedFormat<Nvfp4Groups>());
    }
    run(WordFormat());
}

INLINE void linear(const Linear& job) {
    if (job.T) with_format(job.weights.format, [&](auto format) { linear_of<decltype(format)>(job); });
}
