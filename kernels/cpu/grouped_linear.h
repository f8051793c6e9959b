// Linear layers of a mixture's experts: grouped products over the weights of all experts that have rows. Included inside a
// level's namespace; see level_*.cpp.
//
// The rows are sorted by expert. All experts make one job of panels, which threads share; the rows of an expert are tiled
// by themselves. As in linear.h, each output is one chain of products over its row, so that the bits of a row do not
// depend on the other rows, on their experts or on the number of threads.

constexpr size_t kPanelCost = 8;        // the cost of reading a panel, in rows that are computed meanwhile

// The sorted rows of a pass. The rows of expert e are starts[e] .. starts[e + 1] - 1.
struct ExpertRows {
    const int32_t* starts;  // [count + 1]
    size_t count;           // experts
    size_t rows() const { return size_t(starts[count]); }
};

// A linear layer of each expert, of its own rows of x [rows, K], to its own rows of `out` [rows, N].
struct GroupedLinear {
    const act* x;
    ExpertRows experts;
    size_t K, N;
    const Weights* weights;  // [count]
    act* out;
    int output;

    Linear of(size_t expert) const {
        const size_t start = size_t(experts.starts[expert]), rows = size_t(experts.starts[expert + 1]) - start;
        return {x + start * K, rows, K, weights[expert], N, out + start * N, output};
    }
};

template <class Format>
void grouped_linear_of(const GroupedLinear& job) {
    const size_t total = job.experts.rows(), count = job.experts.count;
    const size_t row_words = Format::row_words(job.K), offsets = Format::row_offsets(job.K);
    PackedRows all;
    all.words = (uint32_t*)quire::scratch(quire::kPackedRows, total * (row_words + 1 + offsets) * 4);
    all.scales = (float*)(all.words + total * row_words);
    all.offsets = (int32_t*)(all.scales + total);
    const auto rows_of = [&](size_t expert) {
        const size_t start = size_t(job.experts.starts[expert]);
        return PackedRows{all.words + start * row_words, all.scales + start, all.offsets + start * offsets};
    };
    quire::parallel_ranges(total, 1 + (8 << 10) / row_words, [&](size_t begin, size_t end) {
        size_t expert = 0;
        while (size_t(job.experts.starts[expert + 1]) <= begin) ++expert;
        for (size_t row = begin; row < end; ++expert) {
            const size_t start = size_t(job.experts.starts[expert]), stop = size_t(job.experts.starts[expert + 1]);
            if (start == stop) continue;
            const Linear one = job.of(expert);
            const Tiling tiling(one.T, Format::kTile);
            const PackedRows rows = rows_of(expert);
            for (; row < stop && row < end; ++row) Format::pack(one, tiling, row - start, rows);
        }
    });
    const size_t width = job.output >= kSiluMul ? kPanel / 2 : kPanel, panels = (job.N + width - 1) / width;
    const auto panel_cost = [&](size_t expert) {
        const size_t rows = size_t(job.experts.starts[expert + 1] - job.experts.starts[expert]);
        return rows ? kPanelCost + rows : 0;
    };
    size_t cost = 0;
    for (size_t expert = 0; expert < count; ++expert) cost += panels * panel_cost(expert);
    // A range of costs has the panels that begin in it.
    quire::parallel_ranges(cost, 2 * kPanelCost, [&](size_t begin, size_t end) {
        size_t at = 0;
        for (size_t expert = 0; expert < count && at < end; ++expert) {
            const size_t each = panel_cost(expert), next = at + panels * each;
            if (each && next > begin) {
                const size_t first = begin > at ? (begin - at + each - 1) / each : 0;
                const size_t last = end < next ? (end - at + each - 1) / each : panels;
                const Linear one = job.of(expert);
                if (first < last) linear_range<Format>(one, Tiling(one.T, Format::kTile), rows_of(expert), first, last);
            }
            at = next;
        }
    });
}

#define INSTANCE_OF_GROUPED_LINEAR(Format) INSTANCE void grouped_linear_of<Format>(const GroupedLinear&);
EACH_FORMAT(INSTANCE_OF_GROUPED_LINEAR)

INLINE void grouped_linear(const GroupedLinear& job) {
    with_format(job.weights[0].format, [&](auto format) { grouped_linear_of<decltype(format)>(job); });
}
