// Paged attention. Included inside a level's namespace; see level_*.cpp.
//
// Keys are processed in chunks of 128 that start at multiples of 128. Each chunk gives each row a result of its own
// (maximum, sum of weights, weighted values), and these results are merged in order. The arithmetic of a row therefore
// depends on its position only: a prefill tile, a decode row and a tile that was cut along the keys give the same bits.
// Keys that a row does not see have weight zero, which changes nothing. Memory beyond the last key of a tile is never
// used.

using quire::AttentionItem;

constexpr int kChunkGroups = kChunkKeys / 16;
constexpr int kChunkWords = kChunkKeys / kPerWord;
// The most tiles of rows that each convert the lines of a group in registers. With more, the group is converted once.
constexpr size_t kMostTilesOfStoredLines = 1;
constexpr float kMinusInfinity = -__builtin_inff(), kLog2E = 1.44269504088896341f;

struct Attention {
    quire::AttentionShape shape;
    const act* q;  // [T, H, D]
    const char *k_cache, *v_cache;  // v_cache: null if the values are the first elements of the keys (latent.h)
    act* out;                       // [T, H * D], or of the width of a value
    float scale;  // of the scores, or of their tanh if they are capped
    KvType kv_type;
    float cap_input_scale = 0.f;   // of the scores inside tanh; 0: no cap
    const float* sinks = nullptr;  // [H]
    int latent_width = 0;          // of a value that is a part of its key; 0: values have the width of keys

    KvLayout layout() const { return {kv_type, size_t(shape.head_dim), size_t(shape.block_size)}; }
    bool has_values() const { return v_cache != nullptr; }
    int value_dim() const { return has_values() ? shape.head_dim : latent_width; }
};

// The running result of some rows: the largest score, the sum of the weights and the weighted sum of values [rows, D].
struct State {
    float *maximum, *total, *values;
};

INLINE State state_at(float* memory, size_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
INLINE size_t state_size(size_t rows, size_t d) { return rows * (d + 2); }

struct Workspace {
    uint32_t *queries, *weights;  // tiles of packed rows; the weights are of one chunk
    uint32_t *keys, *values;      // two groups of keys and a chunk of values, gathered or converted from the cache
    char* gathered;               // one group in the type of the cache, for blocks of 8 keys
    float *key_scales, *value_scales;  // [128]
    float* scores;                // [rows, 128]
    State chunk, running;
};

// d: of a key; value_dim: of a value.
INLINE Workspace workspace(size_t rows, size_t d, size_t value_dim) {
    const size_t state = (state_size(rows, value_dim) + 15) / 16 * 16, query = rows * line_count(d) * 16;
    const size_t group = 16 * word_count(d);
    const size_t size =
        query + rows * kChunkWords + (3 + kChunkGroups) * group + (2 + rows) * kChunkKeys + 2 * state;
    uint32_t* at = (uint32_t*)quire::scratch(quire::kTile, size * 4);
    Workspace w;
    w.queries = at;
    w.weights = w.queries + query;
    w.keys = w.weights + rows * kChunkWords;
    w.values = w.keys + 2 * group;
    w.gathered = (char*)(w.values + kChunkGroups * group);
    w.key_scales = (float*)(w.values + (kChunkGroups + 1) * group);
    w.value_scales = w.key_scales + kChunkKeys;
    w.scores = w.value_scales + kChunkKeys;
    w.chunk = state_at(w.scores + rows * kChunkKeys, rows);
    w.running = state_at(w.scores + rows * kChunkKeys + state, rows);
    return w;
}

// The places of the keys and values of one chunk, and which of them this tile needs.
struct Chunk {
    int start, end;           // positions; `end` is one after the last key that any row of the tile sees
    int first_group, groups;  // groups of 16 keys
    int skipped;              // keys at the start that no row sees
    bool halves;              // blocks have 8 keys: groups must be gathered
    const char *keys[kChunkGroups], *values[kChunkGroups];
};

// Returns the index of the first query of an item among the tokens of the step.
INLINE size_t token_of(const Attention& job, const AttentionItem& item) {
    const int32_t* starts = job.shape.query_start + item.sequence;
    return size_t(starts[1] - job.shape.seq_lens[item.sequence] + item.first);
}

// Returns the group of tokens in the cache that begins at a position.
INLINE const char* group_at(const Attention& job, const AttentionItem& item, bool is_key, int position) {
    const auto& s = job.shape;
    const KvLayout layout = job.layout();
    const size_t block = size_t(s.block_tables[size_t(item.sequence) * s.table_width + position / s.block_size]);
    return (is_key || !job.has_values() ? job.k_cache : job.v_cache) + (block * s.kv_heads + item.kv_head) * layout.head_bytes() +
           size_t(position % s.block_size) / layout.group() * layout.group_bytes();
}

INLINE Chunk locate(const Attention& job, const AttentionItem& item, int index) {
    const auto& s = job.shape;
    const int last = item.key_end;
    const int lowest = s.window && item.first >= s.window ? item.first - s.window + 1 : 0;
    Chunk c;
    c.start = index * kChunkKeys;
    c.end = last - c.start < kChunkKeys ? last : c.start + kChunkKeys;
    c.skipped = lowest > c.start ? lowest - c.start : 0;
    c.halves = s.block_size < 16;
    c.first_group = c.skipped / 16;
    c.groups = (c.end - c.start + 15) / 16;
    if (c.halves) return c;
    for (int g = c.first_group; g < c.groups; ++g) {
        c.keys[g] = group_at(job, item, true, c.start + g * 16);
        c.values[g] = group_at(job, item, false, c.start + g * 16);
    }
    return c;
}

// Copies two blocks of 8 keys into a group of 16, in the type of the cache. A missing half is filled with zeros, and its
// scores are masked.
INLINE void gather(const Attention& job, const AttentionItem& item, const Chunk& c, int g, bool is_key, char* to) {
    const KvLayout layout = job.layout();
    const size_t half_bytes = layout.scales_at(), run = layout.unit() * layout.value_bytes() * 8;
    for (int half = 0; half < 2; ++half) {
        const int first = g * 16 + half * 8;
        const bool missing = first + 8 <= c.skipped || c.start + first >= c.end;
        const char* from = missing ? nullptr : group_at(job, item, is_key, c.start + first);
        // Keys of both halves alternate in runs of 8 units; values of the halves follow each other.
        char* out = to + (is_key ? half * run : half * half_bytes);
        const size_t size = is_key ? run : half_bytes, step = is_key ? 2 * run : 0;
        for (size_t at = 0; at < half_bytes; at += size, out += step)
            missing ? memset(out, 0, size) : memcpy(out, from + at, size);
    }
}

// The keys, or the values, of a group of 16 tokens as tiles read them, and the group of the next chunk that the reader
// prefetches: perhaps these lines themselves, if there is nothing to prefetch.
struct Lines {
    const char *lines, *next;
};

// Returns the keys, or the values, of a group: in the cache, or gathered or converted at `to`. converts: to activations.
// next: the group of the next chunk to prefetch, or null. A conversion prefetches it at once.
INLINE Lines lines_of(const Attention& job, const AttentionItem& item, const Workspace& w, const Chunk& c, int g,
                      bool is_key, bool converts, const char* next, uint32_t* to) {
    const char* stored = is_key ? c.keys[g] : c.values[g];
    if (c.halves) {
        char* gathered = converts ? w.gathered : (char*)to;
        gather(job, item, c, g, is_key, gathered);
        stored = gathered;
    }
    if (!next) next = stored;
    const KvLayout layout = job.layout();
    if (layout.has_scales()) _mm_prefetch(next + layout.scales_at(), _MM_HINT_T1);
    if (!converts) return {stored, next};
    widen(layout, is_key, stored, next, to);
    return {(const char*)to, (const char*)to};
}

// Copies the scales of the keys, or of the values, of a chunk. Those that no row sees become zero: they may be NaN.
INLINE void copy_scales(const Attention& job, const AttentionItem& item, const Chunk& c, bool is_key, float* to) {
    const KvLayout layout = job.layout();
    const int keys = int(layout.group()), length = c.end - c.start;
    for (int first = c.first_group * 16; first < c.groups * 16; first += keys) {
        const bool missing = first + keys <= c.skipped || first >= length;
        const int count = missing ? 0 : length - first < keys ? length - first : keys;
        if (count) memcpy(to + first, group_at(job, item, is_key, c.start + first) + layout.scales_at(), count * 4);
        memset(to + first + count, 0, size_t(keys - count) * 4);
    }
}

// The scores of a chunk that a row sees, counted from the start of the chunk: [low, high). All of them are in the
// vectors of [from, to).
struct Visible {
    int low, high, from, to;
};

// key_end: of the row.
INLINE Visible visible(const Attention& job, const Chunk& c, int position, int key_end) {
    const int window = job.shape.window;
    Visible v;
    v.high = (key_end < c.end ? key_end : c.end) - c.start;
    v.low = window && position - window + 1 > c.start ? position - window + 1 - c.start : 0;
    v.from = v.low / W * W;
    v.to = v.high <= v.low ? v.from : (v.high + W - 1) / W * W;
    return v;
}

// Returns the largest score that a row sees. Other scores in its vectors become minus infinity. scales: of the keys, or
// null.
INLINE float mask_and_max(const Visible& seen, const float* scales, float* scores) {
    const F masked = set1(kMinusInfinity);
    F largest = masked;
    for (int i = seen.from; i < seen.to; i += W) {
        F v = load(scores + i);
        if (scales) v = mul(v, load(scales + i));
        const bool is_edge = i < seen.low || i + W > seen.high;
        if (is_edge) v = select(between(seen.low - i, seen.high - i), v, masked);
        if (scales || is_edge) store(scores + i, v);
        largest = max(v, largest);
    }
    return max_of(largest);
}

// Converts the scores of one row to weights, as packed rows: subtracts the maximum, exponentiates and rounds. Returns
// the sum of the weights. scales: of the values, or null; they multiply the packed weights, but not the sum.
INLINE float soften(const Attention& job, const Chunk& c, const Visible& seen, float maximum, const float* scores,
                    const float* scales, act* weights, size_t line) {
    const F base = set1(maximum == kMinusInfinity ? 0.f : maximum), scale = set1(job.scale * kLog2E);
    F sums = zero();
    for (int i = c.first_group * 16, end = c.groups * 16; i < end; i += W) {
        F p = zero();
        if (i >= seen.from && i < seen.to) p = exp2_negative(mul(sub(load(scores + i), base), scale));
        const unsigned word = unsigned(i) / kPerWord;
        act* to = weights + (word / 16 * line + word % 16) * kPerWord;
        if (scales) {
            act_store(to, mul(p, load(scales + i)));
            sums = add(sums, p);
        } else {
            sums = add(sums, act_store_rounded(to, p));
        }
    }
    return sum(sums);
}

// The groups of the next chunk, each to be prefetched with the group of this chunk that has its number; null: none.
struct Upcoming {
    const char *keys[kChunkGroups] = {}, *values[kChunkGroups] = {};
};

INLINE Upcoming look_ahead(const Attention& job, const Chunk& now, const Chunk& next) {
    Upcoming upcoming;
    if (next.halves) return upcoming;
    const size_t size = job.layout().group_bytes();
    for (int g = next.first_group; g < next.groups; ++g) {
        if (g >= now.first_group && g < now.groups) {
            upcoming.keys[g] = next.keys[g], upcoming.values[g] = next.values[g];
            continue;
        }
        for (size_t at = 0; at < size; at += 64) {
            _mm_prefetch(next.keys[g] + at, _MM_HINT_T1);
            _mm_prefetch(next.values[g] + at, _MM_HINT_T1);
        }
    }
    return upcoming;
}

// Computes the result of some rows for one chunk, and prefetches the next chunk at the same time.
INLINE void attend_chunk(const Attention& job, const AttentionItem& item, const Workspace& w, AttentionState& state,
                         const Chunk& c, const Upcoming& upcoming, const State& out) {
    const int d = job.shape.head_dim, group = job.shape.heads / job.shape.kv_heads;
    const size_t value_dim = size_t(job.value_dim());
    const size_t words = word_count(d), query_words = line_count(d) * 16;
    const int rows = item.count * group;
    const Tiling score_tiling{size_t(rows)}, weigh_tiling(size_t(rows), kWeighRows);
    const bool converts =
        job.kv_type != kKvAct && !(kReadsStoredLines && score_tiling.tiles <= kMostTilesOfStoredLines);
    const KvType type = converts ? kKvAct : job.kv_type;
    for (int g = c.first_group; g < c.groups; g += 2) {
        Lines first = lines_of(job, item, w, c, g, true, converts, upcoming.keys[g], w.keys), second = first;
        if (g + 1 < c.groups)
            second = lines_of(job, item, w, c, g + 1, true, converts, upcoming.keys[g + 1], w.keys + 16 * words);
        for (size_t t = 0; t < score_tiling.tiles; ++t) {
            const size_t start = score_tiling.start(t);
            score_tile(state, type, w.queries + start * query_words, int(score_tiling.rows(t)), first.lines,
                       second.lines, words, first.next, second.next, w.scores + start * kChunkKeys + g * 16);
            first.next = first.lines, second.next = second.lines;  // once is enough
        }
    }
    const char *values[kChunkGroups], *next_values[kChunkGroups];
    for (int g = c.first_group; g < c.groups; ++g) {
        uint32_t* to = w.values + g * 16 * words;
        const bool of_keys = !job.has_values();
        const Lines found = lines_of(job, item, w, c, g, of_keys, of_keys ? job.kv_type != kKvAct : converts,
                                     upcoming.values[g], of_keys ? w.keys : to);
        values[g] = found.lines, next_values[g] = found.next;
        if (of_keys) {
            values_of_keys((const uint32_t*)found.lines, value_dim, to);
            values[g] = next_values[g] = (const char*)to;
        }
    }
    const float *key_scales = nullptr, *value_scales = nullptr;
    if (job.layout().has_scales()) {
        copy_scales(job, item, c, true, w.key_scales);
        copy_scales(job, item, c, false, w.value_scales);
        key_scales = w.key_scales, value_scales = w.value_scales;
    }
    const int32_t* key_ends = job.shape.key_ends ? job.shape.key_ends + token_of(job, item) : nullptr;
    const int begin = c.first_group * kUnitWords, end = (c.end - c.start + kPerWord - 1) / kPerWord;
    const bool odd = (c.end - c.start) % kPerWord != 0;
    for (size_t t = 0; t < weigh_tiling.tiles; ++t) {
        const int start = int(weigh_tiling.start(t)), count = int(weigh_tiling.rows(t));
        uint32_t* weights = w.weights + start * kChunkWords;
        // Two loops, because each row is a long chain of dependent steps: the chains of several rows overlap here.
        Visible seen[kWeighRows];
        for (int r = 0; r < count; ++r) {
            const int query = (start + r) / group, position = item.first + query;
            seen[r] = visible(job, c, position, key_ends ? key_ends[query] : position + 1);
            float* scores = w.scores + (start + r) * kChunkKeys;
            const float cap = job.cap_input_scale;
            if (cap != 0.f) cap_scores(seen[r].from, seen[r].to, key_scales, cap, scores);
            out.maximum[start + r] = mask_and_max(seen[r], cap != 0.f ? nullptr : key_scales, scores);
        }
        for (int r = 0; r < count; ++r)
            out.total[start + r] = soften(job, c, seen[r], out.maximum[start + r], w.scores + (start + r) * kChunkKeys,
                                          value_scales, (act*)(weights + r * 16), size_t(count) * 16);
        weigh_tile(state, job.has_values() ? type : kKvAct, weights, count, values, next_values, begin, end, odd,
                   value_dim, out.values + size_t(start) * value_dim);
        if (t == 0 && weigh_tiling.tiles > 1)
            for (int g = c.first_group; g < c.groups; ++g) next_values[g] = values[g];
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

INLINE void write_out(const Attention& job, const AttentionItem& item, const State& s) {
    const int d = job.value_dim(), group = job.shape.heads / job.shape.kv_heads;
    const size_t token = token_of(job, item);
    for (int r = 0; r < item.count * group; ++r) {
        const size_t head = size_t(item.kv_head) * group + r % group;
        const float base_2 = job.scale * kLog2E;
        const F inverse = job.sinks ? factor_with_sink(s.maximum[r] * base_2, s.total[r], job.sinks[head] * kLog2E)
                                    : set1(s.total[r] > 0.f ? 1.f / s.total[r] : 0.f);
        act* out = job.out + ((token + r / group) * job.shape.heads + head) * size_t(d);
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
    const int d = job.value_dim(), group = job.shape.heads / job.shape.kv_heads;
    const Workspace w = workspace(most_rows, size_t(job.shape.head_dim), size_t(d));
    AttentionState state;
    Chunk now = locate(job, *item, item->chunk), next;
    for (; item < end; ++item) {
        const int rows = item->count * group;
        pack_queries(job, *item, w.queries);
        if (item->partial < 0) clear(w.running, rows, d);
        for (int chunk = item->chunk; chunk < item->chunk_end; ++chunk) {
            Upcoming upcoming;
            if (chunk + 1 < item->chunk_end || item + 1 < end) {
                next = chunk + 1 < item->chunk_end ? locate(job, *item, chunk + 1)
                                                   : locate(job, item[1], item[1].chunk);
                upcoming = look_ahead(job, now, next);
            }
            if (item->partial >= 0) {
                const size_t at = state_size(size_t(item->partial) + size_t(chunk - item->chunk) * rows, d);
                attend_chunk(job, *item, w, state, now, upcoming, state_at(partials + at, rows));
            } else {
                attend_chunk(job, *item, w, state, now, upcoming, w.chunk);
                merge(w.running, w.chunk, rows, d, job.scale);
            }
            now = next;
        }
        if (item->partial < 0) write_out(job, *item, w.running);
    }
}

INLINE void merge_item(const Attention& job, const AttentionItem& item, size_t most_rows, float* partials) {
    const int d = job.value_dim(), rows = item.count * (job.shape.heads / job.shape.kv_heads);
    const Workspace w = workspace(most_rows, size_t(job.shape.head_dim), size_t(d));
    clear(w.running, rows, d);
    const int chunks = quire::end_of_chunks(item.key_end) - item.chunk;
    for (int i = 0; i < chunks; ++i)
        merge(w.running, state_at(partials + state_size(size_t(item.partial) + size_t(i) * rows, d), rows), rows, d,
              job.scale);
    write_out(job, item, w.running);
}

INLINE void paged_attention(const Attention& job, const quire::AttentionPlan& plan) {
    const int group = job.shape.heads / job.shape.kv_heads, d = job.value_dim();
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
