// The division of one attention call into pieces of work. Compiled for the base instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

#include "shared_symbols.h"

namespace quire {

constexpr int kChunkKeys = 128;  // keys of one softmax chunk; in every call, chunks start at multiples of it
constexpr int kQueryRows = 48;   // query rows (positions x heads of a group) that share each load of K and V

struct AttentionShape {
    const int32_t *block_tables, *seq_lens, *query_start;
    size_t table_width, sequences, tokens, block_count;
    int heads, kv_heads, head_dim, block_size, window;
    const int32_t* key_ends = nullptr;  // [tokens], the end of the keys that a query sees; null: after its position
};

// A piece of work: query positions [first, first + count) of one sequence and one kv head, over the chunks of keys
// [chunk, chunk_end). No query sees a key at or after key_end.
struct AttentionItem {
    int32_t sequence, kv_head, first, count, key_end, chunk, chunk_end;
    int64_t cost;
    int64_t partial;  // index of its first row among the saved partial results; -1: the tile was not cut
    bool leads;       // the first item of a tile
};

struct AttentionPlan {
    AttentionItem* items;
    size_t count;
    // A thread computes a run of items, [run_start[i], run_start[i + 1]), and prefetches each while it computes the
    // previous one.
    uint32_t* run_start;
    size_t runs;
    size_t partial_rows;
};

// Returns the number of chunks before a position, that of the position before it included.
inline int32_t end_of_chunks(int32_t key_end) { return (key_end - 1) / kChunkKeys + 1; }

// Returns 0, or 1 + the index of a sequence with invalid lengths or an invalid block table.
SHARED int64_t plan_attention(const AttentionShape& shape, AttentionPlan* plan);

}  // namespace quire
