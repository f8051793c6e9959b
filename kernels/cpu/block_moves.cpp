// Copies of cache blocks, in all caches (k and v of every layer) with one call, whatever the layout inside a block.
//
// A host block has a block of every cache, one after the other. The caller has checked the ids, and no block is both
// read and written.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

namespace quire {
namespace {

constexpr size_t kWorthAThread = 64 << 10;  // least bytes for another thread

// Calls move(cache, i) for each cache and each i < n. Successive calls are for the caches of one block.
template <class Move>
void for_all(size_t caches, size_t n, size_t block_bytes, Move move) {
    parallel_ranges(caches * n, 1 + kWorthAThread / block_bytes, [&](size_t begin, size_t end) {
        for (size_t at = begin; at < end; ++at) move(at % caches, at / caches);
    });
}

}  // namespace
}  // namespace quire

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void quire_copy_blocks(char* const* caches, size_t count, size_t block_bytes, const int64_t* src,
                              const int64_t* dst, size_t n) {
    quire::for_all(count, n, block_bytes, [&](size_t cache, size_t i) {
        std::memcpy(caches[cache] + dst[i] * block_bytes, caches[cache] + src[i] * block_bytes, block_bytes);
    });
}

EXPORT void quire_swap_out(char* const* caches, size_t count, size_t block_bytes, const int64_t* src,
                           const int64_t* dst, size_t n, char* host) {
    quire::for_all(count, n, block_bytes, [&](size_t cache, size_t i) {
        std::memcpy(host + (dst[i] * count + cache) * block_bytes, caches[cache] + src[i] * block_bytes, block_bytes);
    });
}

EXPORT void quire_swap_in(char* const* caches, size_t count, size_t block_bytes, const int64_t* src,
                          const int64_t* dst, size_t n, const char* host) {
    quire::for_all(count, n, block_bytes, [&](size_t cache, size_t i) {
        std::memcpy(caches[cache] + dst[i] * block_bytes, host + (src[i] * count + cache) * block_bytes, block_bytes);
    });
}
