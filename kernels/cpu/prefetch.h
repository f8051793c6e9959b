// Prefetching of the next chunk of keys and values. Included inside a level's namespace; see level_*.cpp.

using quire::kChunkKeys;

constexpr int kChunkGroups = kChunkKeys / 16;

// Prefetches the next chunk, in even shares while this chunk is computed. The pieces of a chunk are scattered over the
// KV cache, where no hardware prefetcher finds them. The prefetches load into the second-level cache, because the few
// miss buffers of the first level would limit the rate.
struct Lookahead {
    const uint32_t* pieces[kChunkGroups * 2];
    size_t count = 0, words = 0, share = 0, piece = 0, word = 0;

    void advance() {
        for (size_t n = 0; n < share && piece < count; ++n) {
            _mm_prefetch((const char*)(pieces[piece] + word), _MM_HINT_T1);
            if ((word += 16) >= words) word = 0, ++piece;
        }
    }
};
