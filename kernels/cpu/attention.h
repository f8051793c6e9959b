// Paged attention. Included inside a level's namespace; see level_*.cpp.
//
// Keys are processed in chunks of 128 that start at multiples of 128. Each chunk gives each row a result of its own
// (maximum, sum of weights, weighted values), and these results are merged in order. The arithmetic of a row therefore
// depends on its position only: a prefill tile, a decode row and a tile that was cut along the keys give the same bits.
// Keys that a row does not see have weight zero, which changes nothing. Memory beyond the last key of a tile is never
// used.

using quire::AttentionItem;

constexpr int kChunkWords = kChunkKeys / kPerWord;
constexpr float kMinusInfinity = -__builtin_inff(), kLog2E = 1.44269504088896341f;

struct Attention {
    quire::AttentionShape shape;
    const act *q, *k_cache, *v_cache;  // q [T, H, D]
    act* out;                          // [T, H * D]
    float scale;
};

// The running result of some rows: the largest score, the sum of the weights and the weighted sum of values [rows, D].
struct State {
    float *maximum, *total, *values;
};

INLINE State state_at(float* memory, size_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
INLINE size_t state_size(size_t rows, size_t d) { return rows * (d + 2); }

struct Workspace {
    uint32_t *queries, *weights;  // tiles of packed rows; the weights are of one chunk
    uint32_t *keys, *values;      // one chunk in groups of 16, for blocks of 8 keys
    float* scores;                // [rows, 128]
    State chunk, running;
};

INLINE Workspace workspace(size_t rows, size_t d) {
    const size_t state = (state_size(rows, d) + 15) / 16 * 16, query = rows * line_count(d) * 16;
    const size_t keys = kChunkKeys * word_count(d);
    const size_t size = query + rows * kChunkWords + 2 * keys + rows * kChunkKeys + 2 * state;
    uint32_t* at = (uint32_t*)quire::scratch(quire::kTile, size * 4);
    Workspace w;
    w.queries = at;
    w.weights = w.queries + query;
    w.keys = w.weights + rows * kChunkWords;
    w.values = w.keys + keys;
    w.scores = (float*)(w.values + keys);
    w.chunk = state_at(w.scores + rows * kChunkKeys, rows);
    w.running = state_at(w.scores + rows * kChunkKeys + state, rows);
    return w;
}

// The addresses of the keys and values of one chunk, and which of them this tile needs.
struct Chunk {
    int start, end;           // positions; `end` is one after the last key that any row of the tile sees
    int first_group, groups;  // groups of 16 keys
    int skipped;              // keys at the start that no row sees
    bool halves;              // blocks have 8 keys: groups must be gathered
    const uint32_t *keys[kChunkGroups], *values[kChunkGroups];
};

INLINE Chunk locate(const Attention& job, const AttentionItem& item, int index) {
    const auto& s = job.shape;
    const int d = s.head_dim, last = item.first + item.count;
    const int lowest = s.window && item.first >= s.window ? item.first - s.window + 1 : 0;
    Chunk c;
    c.start = index * kChunkKeys;
    c.end = last - c.start < kChunkKeys ? last : c.start + kChunkKeys;
    c.skipped = lowest > c.start ? lowest - c.start : 0;
    c.halves = s.block_size < 16;
    c.first_group = c.skipped / 16;
    c.groups = (c.end - c.start + 15) / 16;
    if (c.halves) return c;
    const int32_t* table = s.block_tables + size_t(item.sequence) * s.table_width;
    const auto at = [&](const act* cache, int position) {
        const size_t block = size_t(table[position / s.block_size]);
        return cache + ((block * s.kv_heads + item.kv_head) * s.block_size + position % s.block_size) * size_t(d);
    };
    for (int g = c.first_group; g < c.groups; ++g) {
        c.keys[g] = (const uint32_t*)at(job.k_cache, c.start + g * 16);
        c.values[g] = (const uint32_t*)at(job.v_cache, c.start + g * 16);
    }
    return c;
}

// Copies two blocks of 8 keys into each group of 16. A missing half is filled with zeros, and its scores are masked.
INLINE void gather(const Attention& job, const AttentionItem& item, const Workspace& w, Chunk& c) {
    const auto& s = job.shape;
    const size_t d = size_t(s.head_dim), words = word_count(d), half_words = 4 * d * 2 / kPerWord;
    const int32_t* table = s.block_tables + size_t(item.sequence) * s.table_width;
    for (int g = c.first_group; g < c.groups; ++g) {
        uint32_t *keys = w.keys + g * words * 16, *values = w.values + g * kUnitWords * d;
        c.keys[g] = keys;
        c.values[g] = values;
        for (int half = 0; half < 2; ++half) {
            const int first = g * 16 + half * 8;
            if (first + 8 <= c.skipped || c.start + first >= c.end) {
                for (size_t k = 0; k < words; ++k) memset(keys + k * 16 + half * 8, 0, 8 * 4);
                memset(values + half * half_words, 0, half_words * 4);
                continue;
            }
            const size_t at = (size_t(table[(c.start + first) / 8]) * s.kv_heads + item.kv_head) * 8 * d;
            const auto* from = (const uint32_t*)(job.k_cache + at);
            for (size_t k = 0; k < words; ++k) memcpy(keys + k * 16 + half * 8, from + k * 8, 8 * 4);
            memcpy(values + half * half_words, job.v_cache + at, half_words * 4);
        }
    }
}

// The scores of a chunk that a row sees, counted from the start of the chunk: [low, high). All of them are in the
// vectors of [from, to).
struct Visible {
    int low, high, from, to;
};

INLINE Visible visible(const Attention& job, const Chunk& c, int position) {
    const int window = job.shape.window;
    Visible v;
    v.high = (position + 1 < c.end ? position + 1 : c.end) - c.start;
    v.low = window && position - window + 1 > c.start ? position - window + 1 - c.start : 0;
    v.from = v.low / W * W;
    v.to = v.high <= v.low ? v.from : (v.high + W - 1) / W * W;
    return v;
}

// Returns the largest score that a row sees. Other scores in its vectors become minus infinity.
INLINE float mask_and_max(const Visible& seen, float* scores) {
    const F masked = set1(kMinusInfinity);
    F largest = masked;
    for (int i = seen.from; i < seen.to; i += W) {
        F v = load(scores + i);
        if (i < seen.low || i + W > seen.high) {
            v = select(between(seen.low - i, seen.high - i), v, masked);
            store(scores + i, v);
        }
        largest = max(v, largest);
    }
    return max_of(largest);
}

// Converts the scores of one row to weights, as packed rows: subtracts the maximum, exponentiates and rounds. Returns
// the sum of the weights.
INLINE float soften(const Attention& job, const Chunk& c, const Visible& seen, float maximum, const float* scores,
                    act* weights, size_t line) {
    const F base = set1(maximum == kMinusInfinity ? 0.f : maximum), scale = set1(job.scale * kLog2E);
    F sums = zero();
    for (int i = c.first_group * 16, end = c.groups * 16; i < end; i += W) {
        F p = zero();
        if (i >= seen.from && i < seen.to) p = exp2_negative(mul(sub(load(scores + i), base), scale));
        const unsigned word = unsigned(i) / kPerWord;
        sums = add(sums, act_store_rounded(weights + (word / 16 * line + word % 16) * kPerWord, p));
    }
    return sum(sums);
}

INLINE Lookahead look_ahead(const Chunk& now, const Chunk& next, size_t d) {
    Lookahead ahead;
    if (next.halves) return ahead;
    for (int g = next.first_group; g < next.groups; ++g) ahead.pieces[ahead.count++] = next.keys[g];
    for (int g = next.first_group; g < next.groups; ++g) ahead.pieces[ahead.count++] = next.values[g];
    ahead.words = 16 * word_count(d);
    // One share for each pair of groups of keys, and one for each group of values.
    const size_t groups = now.groups - now.first_group, shares = (groups + 1) / 2 + groups;
    ahead.share = (ahead.count * ahead.words / 16 + shares - 1) / shares;
    return ahead;
}

// Computes the result of some rows for one chunk, and prefetches the next chunk at the same time.
INLINE void attend_chunk(const Attention& job, const AttentionItem& item, const Workspace& w, AttentionState& state,
                         Chunk& c, Lookahead& ahead, const State& out) {
    const int d = job.shape.head_dim, group = job.shape.heads / job.shape.kv_heads;
    const size_t words = word_count(d), query_words = line_count(d) * 16;
    const int rows = item.count * group;
    if (c.halves) gather(job, item, w, c);
    const Tiling score_tiling{size_t(rows)};
    for (int g = c.first_group; g < c.groups; g += 2) {
        const int other = g + 1 < c.groups ? g + 1 : g;
        ahead.advance();
        for (size_t t = 0; t < score_tiling.tiles; ++t) {
            const size_t start = score_tiling.start(t);
            score_tile(state, w.queries + start * query_words, int(score_tiling.rows(t)), c.keys[g], c.keys[other],
                       words, w.scores + start * kChunkKeys + g * 16);
        }
    }
    const int begin = c.first_group * kUnitWords, end = (c.end - c.start + kPerWord - 1) / kPerWord;
    const bool odd = (c.end - c.start) % kPerWord != 0;
    const Tiling weigh_tiling(size_t(rows), kWeighRows);
    for (size_t t = 0; t < weigh_tiling.tiles; ++t) {
        const int start = int(weigh_tiling.start(t)), count = int(weigh_tiling.rows(t));
        uint32_t* weights = w.weights + start * kChunkWords;
        // Two loops, because each row is a long chain of dependent steps: the chains of several rows overlap here.
        Visible seen[kWeighRows];
        for (int r = 0; r < count; ++r) {
            seen[r] = visible(job, c, item.first + (start + r) / group);
            out.maximum[start + r] = mask_and_max(seen[r], w.scores + (start + r) * kChunkKeys);
        }
        for (int r = 0; r < count; ++r)
            out.total[start + r] = soften(job, c, seen[r], out.maximum[start + r], w.scores + (start + r) * kChunkKeys,
                                          (act*)(weights + r * 16), size_t(count) * 16);
        weigh_tile(state, weights, count, c.values, ahead, begin, end, odd, size_t(d), out.values + size_t(start) * d);
    }
}

INLINE void merge(const State& to, const State& from, int rows, int d, float scale) {
    const F factor = set1(scale * kLog2E);
    for (int r0 = 0; r0 < rows; r0 += W) {
        const int count = rows - r0 < W ? rows - r0 : W;
        float keep[W], take[W];
        const F old = load(to.maximum + r0, count), found = load(from.maximum + r0, count), larger = max(old, found);
        store(keep, exp2_negative(mul(sub(old, larger), factor)));
        store(take, exp2_negative(mul(sub(found, larger), factor)));
        store(to.maximum + r0, larger, count);
        const F total = add(mul(load(to.total + r0, count), load(keep)), mul(load(from.total + r0, count), load(take)));
        store(to.total + r0, total, count);
        for (int r = r0; r < r0 + count; ++r) {
            const F k = set1(keep[r - r0]), t = set1(take[r - r0]);
            float *v = to.values + size_t(r) * d, *f = from.values + size_t(r) * d;
            for (int i = 0; i < d; i += W) store(v + i, fma(load(v + i), k, mul(load(f + i), t)));
        }
    }
}

INLINE void clear(const State& s, int rows, int d) {
    for (int r = 0; r < rows; ++r) s.maximum[r] = kMinusInfinity, s.total[r] = 0.f;
    for (int i = 0; i < rows * d; i += W) store(s.values + i, zero());
}

INLINE size_t token_of(const Attention& job, const AttentionItem& item) {
    const int32_t* starts = job.shape.query_start + item.sequence;
    return size_t(starts[1] - job.shape.seq_lens[item.sequence] + item.first);
}

INLINE void write_out(const Attention& job, const AttentionItem& item, const State& s) {
    const int d = job.shape.head_dim, group = job.shape.heads / job.shape.kv_heads;
    const size_t token = token_of(job, item);
    for (int r = 0; r < item.count * group; ++r) {
        const F inverse = set1(s.total[r] > 0.f ? 1.f / s.total[r] : 0.f);
        act* out = job.out + ((token + r / group) * job.shape.heads + item.kv_head * group + r % group) * size_t(d);
        for (int i = 0; i < d; i += W) act_store(out + i, mul(load(s.values + size_t(r) * d + i), inverse));
    }
}

INLINE void pack_queries(const Attention& job, const AttentionItem& item, uint32_t* out) {
    const int d = job.shape.head_dim, group = job.shape.heads / job.shape.kv_heads, rows = item.count * group;
    const size_t token = token_of(job, item);
    const Tiling tiling{size_t(rows)};
    for (int r = 0; r < rows; ++r) {
        const size_t head = (token + r / group) * job.shape.heads + item.kv_head * group + r % group;
        pack_row(tiling, size_t(r), job.q + head * d, size_t(d), out);
    }
}

INLINE void attend_items(const Attention& job, const AttentionItem* item, const AttentionItem* end, size_t most_rows,
                         float* partials) {
    const int d = job.shape.head_dim, group = job.shape.heads / job.shape.kv_heads;
    const Workspace w = workspace(most_rows, d);
    AttentionState state;
    Chunk now = locate(job, *item, item->chunk), next;
    for (; item < end; ++item) {
        const int rows = item->count * group;
        pack_queries(job, *item, w.queries);
        if (item->partial < 0) clear(w.running, rows, d);
        for (int chunk = item->chunk; chunk < item->chunk_end; ++chunk) {
            Lookahead ahead;
            if (chunk + 1 < item->chunk_end || item + 1 < end) {
                next = chunk + 1 < item->chunk_end ? locate(job, *item, chunk + 1)
                                                   : locate(job, item[1], item[1].chunk);
                ahead = look_ahead(now, next, d);
            }
            if (item->partial >= 0) {
                const size_t at = state_size(size_t(item->partial) + size_t(chunk - item->chunk) * rows, d);
                attend_chunk(job, *item, w, state, now, ahead, state_at(partials + at, rows));
            } else {
                attend_chunk(job, *item, w, state, now, ahead, w.chunk);
                merge(w.running, w.chunk, rows, d, job.scale);
            }
            now = next;
        }
        if (item->partial < 0) write_out(job, *item, w.running);
    }
}

INLINE void merge_item(const Attention& job, const AttentionItem& item, size_t most_rows, float* partials) {
    const int d = job.shape.head_dim, rows = item.count * (job.shape.heads / job.shape.kv_heads);
    const Workspace w = workspace(most_rows, d);
    clear(w.running, rows, d);
    const int chunks = (item.first + item.count - 1) / kChunkKeys + 1 - item.chunk;
    for (int i = 0; i < chunks; ++i)
        merge(w.running, state_at(partials + state_size(size_t(item.partial) + size_t(i) * rows, d), rows), rows, d,
              job.scale);
    write_out(job, item, w.running);
}

INLINE void paged_attention(const Attention& job, const quire::AttentionPlan& plan) {
    const int group = job.shape.heads / job.shape.kv_heads, d = job.shape.head_dim;
    const size_t most_rows = group > quire::kQueryRows ? group : quire::kQueryRows;
    float* partials = nullptr;
    if (plan.partial_rows) partials = (float*)quire::scratch(quire::kPartials, state_size(plan.partial_rows, d) * 4);
    quire::parallel(plan.runs, [&](size_t i) {
        attend_items(job, plan.items + plan.run_start[i], plan.items + plan.run_start[i + 1], most_rows, partials);
    });
    if (!plan.partial_rows) return;
    quire::parallel_ranges(plan.count, 1, [&](size_t begin, size_t end) {
        for (const AttentionItem* item = plan.items + begin; item < plan.items + end; ++item)
            if (item->partial >= 0 && item->leads) merge_item(job, *item, most_rows, partials);
    });
}
