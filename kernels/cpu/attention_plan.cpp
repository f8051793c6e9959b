#include "attention_plan.h"

#include <algorithm>

#include "thread_pool.h"

namespace quire {
namespace {

int64_t check(const AttentionShape& s) {
    if (s.query_start[0] != 0 || s.query_start[s.sequences] != int32_t(s.tokens)) return 1;
    for (size_t i = 0; i < s.sequences; ++i) {
        const int32_t queries = s.query_start[i + 1] - s.query_start[i], length = s.seq_lens[i];
        if (queries < 0 || queries > length) return 1 + int64_t(i);
        if (queries == 0) continue;
        const int32_t blocks = (length + s.block_size - 1) / s.block_size;
        if (size_t(blocks) > s.table_width) return 1 + int64_t(i);
        // The entries of blocks before every window are not checked, because such blocks may have been freed.
        const int32_t lowest = s.window ? std::max(0, length - queries - s.window + 1) : 0;
        for (int32_t b = lowest / s.block_size; b < blocks; ++b) {
            const int32_t block = s.block_tables[i * s.table_width + b];
            if (block < 0 || size_t(block) >= s.block_count) return 1 + int64_t(i);
        }
        for (int32_t q = 0; s.key_ends && q < queries; ++q) {
            const int32_t end = s.key_ends[s.query_start[i] + q];
            if (end <= length - queries + q || end > length) return 1 + int64_t(i);
        }
    }
    return 0;
}

// Calls use(sequence, first query position, number of positions, end of keys, first chunk) for every tile.
template <class Use>
void each_tile(const AttentionShape& s, Use use) {
    const int32_t group = s.heads / s.kv_heads, per_tile = std::max(1, kQueryRows / group);
    for (size_t i = 0; i < s.sequences; ++i) {
        const int32_t queries = s.query_start[i + 1] - s.query_start[i];
        for (int32_t q = 0; q < queries; q += per_tile) {
            const int32_t count = std::min(per_tile, queries - q), first = s.seq_lens[i] - queries + q;
            const int32_t lowest = s.window ? std::max(0, first - s.window + 1) : 0;
            int32_t key_end = first + count;
            for (int32_t t = 0; s.key_ends && t < count; ++t)
                key_end = std::max(key_end, s.key_ends[s.query_start[i] + q + t]);
            use(int32_t(i), first, count, key_end, lowest / kChunkKeys);
        }
    }
}

}  // namespace

int64_t plan_attention(const AttentionShape& s, AttentionPlan* plan) {
    if (const int64_t bad = check(s)) return bad;
    const int32_t group = s.heads / s.kv_heads;
    size_t tiles = 0;
    int64_t total = 0, largest = 0;
    each_tile(s, [&](int32_t, int32_t, int32_t count, int32_t key_end, int32_t begin) {
        const int64_t cost = int64_t(end_of_chunks(key_end) - begin) * (count * group + 4);
        ++tiles;
        total += cost * s.kv_heads;
        largest = std::max(largest, cost);
    });
    // A tile that costs more than a share is cut along the keys, so that one long sequence occupies all threads.
    const int threads = thread_count();
    const int64_t share = threads == 1 ? INT64_MAX : std::max<int64_t>(1, total / (threads * 4));
    size_t count = 0, partial_rows = 0;
    const auto pieces = [&](int64_t cost, int32_t chunks) {
        return cost <= share ? 1 : int32_t(std::min<int64_t>(chunks, (cost + share - 1) / share));
    };
    each_tile(s, [&](int32_t, int32_t, int32_t queries, int32_t key_end, int32_t begin) {
        const int32_t chunks = end_of_chunks(key_end) - begin;
        count += pieces(int64_t(chunks) * (queries * group + 4), chunks);
    });
    count *= s.kv_heads;
    auto* items = static_cast<AttentionItem*>(scratch(kPlan, count * (sizeof(AttentionItem) + 4) + 4));
    auto* run_start = reinterpret_cast<uint32_t*>(items + count);
    size_t at = 0;
    each_tile(s, [&](int32_t sequence, int32_t first, int32_t queries, int32_t key_end, int32_t begin) {
        const int64_t per_chunk = queries * group + 4;
        const int32_t chunks = end_of_chunks(key_end) - begin, cuts = pieces(chunks * per_chunk, chunks);
        for (int32_t head = 0; head < s.kv_heads; ++head)
            for (int32_t cut = 0; cut < cuts; ++cut) {
                AttentionItem& item = items[at++];
                item = {sequence, head, first, queries, key_end, begin + chunks * cut / cuts,
                        begin + chunks * (cut + 1) / cuts, 0, -1, cut == 0};
                item.cost = (item.chunk_end - item.chunk) * per_chunk;
                if (cuts > 1) {
                    item.partial = int64_t(partial_rows);
                    partial_rows += size_t(item.chunk_end - item.chunk) * queries * group;
                }
            }
    });
    // Long items first, so that short items fill the gaps. The sort is stable, so parts of a tile stay in order.
    if (count > 1 && largest * 4 > total / threads)
        std::stable_sort(items, items + count,
                         [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
    const int64_t run = threads == 1 ? total : total / (threads * 8);
    size_t runs = 0;
    int64_t cost = 0;
    for (size_t i = 0; i < count; ++i) {
        if (i == 0 || cost + items[i].cost > run) run_start[runs++] = uint32_t(i), cost = 0;
        cost += items[i].cost;
    }
    run_start[runs] = uint32_t(count);
    *plan = {items, count, run_start, runs, partial_rows};
    return 0;
}

}  // namespace quire
