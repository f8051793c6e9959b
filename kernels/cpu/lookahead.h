// What comes next in memory. Included inside a level's namespace; see level_*.cpp.

using quire::kChunkKeys;

constexpr int kChunkGroups = kChunkKeys / 16;

// The memory of the next chunk, asked for in even shares while this chunk is computed: its pieces lie all over the
// cache, where no hardware prefetcher finds them. Into the second level, because the few miss buffers of the first
// would limit the rate.
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
