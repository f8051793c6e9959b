// Reads memory with all threads and does nothing else: the bandwidth that benchmarks compare kernels with.
#include <emmintrin.h>

#include <cstddef>
#include <cstdint>

#include "thread_pool.h"

namespace {

constexpr size_t kPiece = 1 << 20;  // bytes that a thread takes at a time
constexpr size_t kAhead = 2048;     // prefetch distance in bytes

// Returns the exclusive or of all 8-byte words of [at, end), whose size is a multiple of 64.
uint64_t read(const char* at, const char* end) {
    __m128i sums[4] = {};
    for (; at < end; at += 64) {
        _mm_prefetch(at + kAhead, _MM_HINT_T0);
        for (int i = 0; i < 4; ++i) sums[i] = _mm_xor_si128(sums[i], _mm_loadu_si128((const __m128i*)at + i));
    }
    const __m128i sum = _mm_xor_si128(_mm_xor_si128(sums[0], sums[1]), _mm_xor_si128(sums[2], sums[3]));
    return uint64_t(_mm_cvtsi128_si64(sum) ^ _mm_cvtsi128_si64(_mm_unpackhi_epi64(sum, sum)));
}

}  // namespace

// Returns the exclusive or of the 8-byte words in the first size / 64 * 64 bytes.
extern "C" __attribute__((visibility("default"))) uint64_t quire_read_memory(const char* memory, size_t size) {
    size = size / 64 * 64;
    uint64_t result = 0;
    quire::parallel((size + kPiece - 1) / kPiece, [&](size_t piece) {
        const size_t begin = piece * kPiece, end = begin + kPiece < size ? begin + kPiece : size;
        __atomic_fetch_xor(&result, read(memory + begin, memory + end), __ATOMIC_RELAXED);
    });
    return result;
}
