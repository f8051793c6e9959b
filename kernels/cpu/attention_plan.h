// How one attention call is cut into pieces of work. Plain bookkeeping, compiled for the base instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

constexpr int kChunkKeys = 128;  // keys of one softmax chunk; chunks start at multiples of it, whatever the call
constexpr int kQueryRows = 48;   // query rows (positions x heads of a group) that share each load of K and V

struct AttentionShape {
    const int32_t *block_tables, *seq_lens, *query_start;
    size_t table_width, sequences, tokens, block_count;
    int heads, kv_heads, head_dim, block_size, window;
};

// Query positions [first, first + count) of one sequence and one kv head, over the chunks [chunk, chunk_end).
struct AttentionItem {
    int32_t sequence, kv_head, first, count, chunk, chunk_end;
    int64_t cost;
    int64_t partial;  // index of its first row among the saved partial results, or -1 where the item is whole
    bool leads;       // the first of the items of a tile that was cut along the keys
};

struct AttentionPlan {
    AttentionItem* items;
    size_t count;
    // Small items go in runs, [run_start[i], run_start[i + 1]): one is fetched while the one before it is computed.
    uint32_t* run_start;
    size_t runs;
    size_t partial_rows;
};

// 0, or 1 + the sequence whose lengths or block table are impossible.
int64_t plan_attention(const AttentionShape& shape, AttentionPlan* plan);

}  // namespace quire
