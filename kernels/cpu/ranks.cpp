#include "ranks.h"

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#include "thread_pool.h"

namespace quire {
namespace {

constexpr size_t kPlaceBytes = 1 << 20;  // longer tensors are exchanged in pieces
constexpr int kMaxRanks = 64;
constexpr unsigned kSpins = 4'000, kYields = 2'000;  // for tens of microseconds, then for milliseconds
constexpr long kNapNs = 100'000;
constexpr size_t kAtOnce = 512;             // elements whose sums are kept in float32 at a time
constexpr size_t kWorthAThread = 16 << 10;  // least elements for another thread

struct alignas(64) Line {
    std::atomic<uint64_t> turn;  // the last turn for which this rank has written
};

// The start of the shared memory. The memory is zeroed at first. The places follow: [2, in alternate
// turns][ranks][kPlaceBytes].
struct Header {
    Line lines[kMaxRanks];
    alignas(64) std::atomic<uint32_t> given_up;
};

float widen(uint16_t bits) {
    const uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// Rounds a sum of bfloat16 values to even. In a NaN the lower 16 bits of such a sum are zero, so it stays a NaN.
uint16_t round_to_bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

}  // namespace

struct Ranks {
    Header* header;
    char* places;
    size_t rank, size;
    uint64_t turn = 0;

    char* place(size_t of) const { return places + ((turn & 1) * size + of) * kPlaceBytes; }

    bool wait_for(const std::atomic<uint64_t>& line) const {
        for (unsigned tries = 0; line.load(std::memory_order_acquire) < turn; ++tries) {
            if (header->given_up.load(std::memory_order_relaxed)) return false;
            if (tries < kSpins) {
                __builtin_ia32_pause();
            } else if (tries < kSpins + kYields) {
                sched_yield();
            } else {
                const timespec nap{0, kNapNs};
                nanosleep(&nap, nullptr);
            }
        }
        return true;
    }

    // Begins a turn: writes `bytes` of this rank, which may be 0, and waits until every rank has written. Returns false
    // if a rank has given up.
    bool meet(const char* mine, size_t bytes) {
        ++turn;
        if (header->given_up.load(std::memory_order_relaxed)) return false;
        if (bytes) std::memcpy(place(rank), mine, bytes);
        header->lines[rank].turn.store(turn, std::memory_order_release);
        for (size_t of = 0; of < size; ++of)
            if (!wait_for(header->lines[of].turn)) return false;
        return true;
    }

    template <class Body>
    bool in_pieces(size_t bytes, Body body) {
        for (size_t at = 0; at < bytes; at += kPlaceBytes)
            if (!body(at, bytes - at < kPlaceBytes ? bytes - at : kPlaceBytes)) return false;
        return true;
    }
};

namespace {

// The function is compiled for two kinds of processors, with the same order of additions.
#define ON_VECTORS __attribute__((target_clones("arch=x86-64-v3", "default")))

// out[i] = the sum of element i over all ranks, in their order.
ON_VECTORS void sum(const Ranks& ranks, float* out, size_t begin, size_t end) {
    for (size_t rank = 0; rank < ranks.size; ++rank) {
        const auto* from = reinterpret_cast<const float*>(ranks.place(rank));
        for (size_t i = begin; i < end; ++i) out[i] = rank ? out[i] + from[i] : from[i];
    }
}

ON_VECTORS void sum(const Ranks& ranks, uint16_t* out, size_t begin, size_t end) {
    float sums[kAtOnce];
    for (size_t at = begin; at < end; at += kAtOnce) {
        const size_t n = end - at < kAtOnce ? end - at : kAtOnce;
        for (size_t rank = 0; rank < ranks.size; ++rank) {
            const auto* from = reinterpret_cast<const uint16_t*>(ranks.place(rank)) + at;
            for (size_t i = 0; i < n; ++i) sums[i] = rank ? sums[i] + widen(from[i]) : widen(from[i]);
        }
        for (size_t i = 0; i < n; ++i) out[at + i] = round_to_bfloat16(sums[i]);
    }
}

}  // namespace

bool all_reduce(Ranks* ranks, void* values, size_t count, size_t element_bytes) {
    return ranks->in_pieces(count * element_bytes, [&](size_t at, size_t bytes) {
        char* own = static_cast<char*>(values) + at;
        if (!ranks->meet(own, bytes)) return false;
        parallel_ranges(bytes / element_bytes, kWorthAThread, [&](size_t begin, size_t end) {
            if (element_bytes == sizeof(float)) return sum(*ranks, reinterpret_cast<float*>(own), begin, end);
            sum(*ranks, reinterpret_cast<uint16_t*>(own), begin, end);
        });
        return true;
    });
}

}  // namespace quire

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT size_t quire_ranks_bytes(size_t size) {
    return size > quire::kMaxRanks ? 0 : sizeof(quire::Header) + 2 * size * quire::kPlaceBytes;
}

EXPORT void* quire_ranks_open(void* memory, size_t rank, size_t size) {
    auto* header = static_cast<quire::Header*>(memory);
    return new quire::Ranks{header, reinterpret_cast<char*>(header + 1), rank, size};
}

EXPORT void quire_ranks_give_up(quire::Ranks* ranks) { ranks->header->given_up = 1; }

EXPORT int quire_ranks_all_reduce(quire::Ranks* ranks, void* values, size_t count, size_t element_bytes) {
    return quire::all_reduce(ranks, values, count, element_bytes);
}

// Copies the values of rank 0 to all ranks.
EXPORT int quire_ranks_broadcast(quire::Ranks* ranks, char* values, size_t bytes) {
    return ranks->in_pieces(bytes, [&](size_t at, size_t count) {
        if (!ranks->meet(values + at, ranks->rank == 0 ? count : 0)) return false;
        if (ranks->rank) std::memcpy(values + at, ranks->place(0), count);
        return true;
    });
}

// Copies the values of all ranks to `out` [ranks][bytes] of rank 0. On other ranks `out` is null.
EXPORT int quire_ranks_gather(quire::Ranks* ranks, const char* values, size_t bytes, char* out) {
    return ranks->in_pieces(bytes, [&](size_t at, size_t count) {
        if (!ranks->meet(values + at, count)) return false;
        for (size_t of = 0; out && of < ranks->size; ++of) std::memcpy(out + of * bytes + at, ranks->place(of), count);
        return true;
    });
}
