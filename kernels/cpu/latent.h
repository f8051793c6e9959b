// The latent KV cache (MLA): one row per token and layer, of which all heads make their keys and values. Included inside
// a level's namespace; see level_*.cpp.
//
// A row is stored as a key of one kv head (kv_cache.h). Its first elements are the value, too. Products with values read
// them in another order, so the values of a group are put into that order once for all heads of a tile.

// Puts the first `value_dim` elements of 16 keys into the order of values. Both in words of activations.
INLINE void values_of_keys(const uint32_t* keys, size_t value_dim, uint32_t* values) {
#ifdef ACT_BF16
    for (size_t j = 0; j < value_dim / 2; ++j, keys += 16)
        for (size_t pair = 0; pair < 8; ++pair) {
            const uint32_t a = keys[2 * pair], b = keys[2 * pair + 1];
            values[pair * value_dim + 2 * j] = (a & 0xffff) | b << 16;
            values[pair * value_dim + 2 * j + 1] = a >> 16 | (b & 0xffff0000);
        }
#else
    for (size_t first = 0; first < value_dim; first += 16)
        for (size_t key = 0; key < 16; ++key)
            for (size_t j = first; j < first + 16; ++j) values[key * value_dim + j] = keys[j * 16 + key];
#endif
}

struct LatentRows {
    const act* rows;  // [T, D]
    const void* slots;
    char* cache;
    size_t T, block_count, block_size, D;
    int wide_slots;  // int64 rather than int32
    KvType kv_type;
};

// Writes each row to its slot; -1 is none. Returns 0, or 1 + the index of the first invalid slot.
INLINE int64_t cache_latent(const LatentRows& job) {
    const auto slot = [&](size_t t) {
        return job.wide_slots ? ((const int64_t*)job.slots)[t] : int64_t(((const int32_t*)job.slots)[t]);
    };
    const int64_t slot_count = int64_t(job.block_count * job.block_size);
    for (size_t t = 0; t < job.T; ++t)
        if (slot(t) < -1 || slot(t) >= slot_count) return 1 + int64_t(t);
    quire::parallel_ranges(job.T, 16, [&](size_t begin, size_t end) {
        const KvLayout layout{job.kv_type, job.D, job.block_size};
        for (size_t t = begin; t < end; ++t) {
            if (slot(t) < 0) continue;
            const size_t block = size_t(slot(t)) / job.block_size, offset = size_t(slot(t)) % job.block_size;
            write_row(layout, true, job.cache + block * layout.head_bytes(), offset, job.rows + t * job.D);
        }
    });
    return 0;
}
