// Rows of an embedding table. Included inside a level's namespace; see level_*.cpp.

// Copies n values of a row, from the format of the table to that of activations.
INLINE void copy_row(const void* table, size_t row, int format, size_t n, act* out) {
#ifndef ACT_BF16
    if (format == kBfloat16 || format == kFloat16) {
        const auto* from = (const uint16_t*)table + row * n;
        const auto widen = [&](const uint16_t* p) { return format == kFloat16 ? load_float16(p) : load_bfloat16(p); };
        size_t i = 0;
        for (; i + W <= n; i += W) store(out + i, widen(from + i));
        if (i == n) return;
        uint16_t rest[W] = {};
        memcpy(rest, from + i, (n - i) * sizeof *rest);
        store(out + i, widen(rest), int(n - i));
        return;
    }
#endif
    (void)format;
    memcpy(out, (const act*)table + row * n, n * sizeof(act));
}

// format: of the table; kWords is the type of activations. Returns 0, or 1 + the index of the first invalid id.
template <class Id>
INLINE int64_t embed(const Id* ids, size_t rows, const void* table, int format, size_t vocab, size_t n, act* out) {
    for (size_t r = 0; r < rows; ++r)
        if (ids[r] < 0 || size_t(ids[r]) >= vocab) return 1 + int64_t(r);
    quire::parallel_ranges(rows, 1 + (64 << 10) / n, [&](size_t begin, size_t end) {
        for (size_t r = begin; r < end; ++r) copy_row(table, size_t(ids[r]), format, n, out + r * n);
    });
    return 0;
}
