#include "thread_pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

namespace quire {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kWorkerSpinNs = 40'000;
constexpr int64_t kCallerSpinNs = 60'000;

int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}

void futex_wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

// Waits until `done()` holds and returns true, or until the time is up and returns false.
template <class Done>
bool spin(int64_t limit_ns, Done done) {
    if (done()) return true;
    const int64_t end = now_ns() + limit_ns;
    do {
        for (int i = 0; i < 16; ++i) {
            if (done()) return true;
            __builtin_ia32_pause();
        }
    } while (now_ns() < end);
    return done();
}

// Runs one job at a time. `ticket` holds (job number | parts | next part), so that one atomic step claims a part and
// tells whether the claim is valid: a worker that wakes late claims a part of the current job or nothing, never a part
// of a finished job.
struct Pool {
    std::atomic<bool> busy{false};
    int wanted = 1;
    int started = 1;  // the caller counts as one
    void (*fn)(void*, size_t) = nullptr;
    void* ctx = nullptr;
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    alignas(64) std::atomic<uint32_t> done{0};
    alignas(64) std::atomic<uint32_t> sleepers{0};
    std::atomic<uint32_t> caller_sleeps{0};
    // The CPUs of each thread; changed while `busy` is held. Workers read it while a job runs, which holds `busy` too.
    std::vector<cpu_set_t> places;
    std::atomic<uint32_t> places_version{0};

    static constexpr int kPartBits = 20;
    static constexpr uint64_t kPartMask = (uint64_t(1) << kPartBits) - 1;

    // Moves this thread to its CPUs if they have changed. Call it with a part claimed: `places` cannot change then.
    void move(int index, uint32_t& places_seen) {
        const uint32_t version = places_version.load(std::memory_order_acquire);
        if (version == places_seen) return;
        places_seen = version;
        if (size_t(index) < places.size()) sched_setaffinity(0, sizeof places[index], &places[index]);
    }

    // Claims and computes parts until none is left. Returns the number of parts that it computed. index: of a worker, 0
    // for the caller, which is not moved.
    uint32_t work(int index, uint32_t& places_seen) {
        uint32_t computed = 0;
        for (;;) {
            const uint64_t t = ticket.fetch_add(1, std::memory_order_acq_rel);
            const uint64_t part = t & kPartMask, parts = (t >> kPartBits) & kPartMask;
            if (part >= parts) {
                // Undo the claim, so that many late claims cannot overflow into the bits of `parts`.
                uint64_t expected = t + 1;
                ticket.compare_exchange_strong(expected, t, std::memory_order_acq_rel);
                return computed;
            }
            if (index) move(index, places_seen);
            fn(ctx, size_t(part));
            ++computed;
            if (done.fetch_add(1, std::memory_order_seq_cst) + 1 == parts &&
                caller_sleeps.load(std::memory_order_seq_cst))
                futex_wake(done, 1);
        }
    }

    void worker(int index) {
        uint32_t seen = epoch.load(std::memory_order_acquire) - 1, places_seen = 0;
        for (;;) {
            if (index < wanted_now.load(std::memory_order_relaxed)) work(index, places_seen);
            const auto changed = [&] { return epoch.load(std::memory_order_acquire) != seen; };
            if (!spin(kWorkerSpinNs, changed)) {
                sleepers.fetch_add(1, std::memory_order_seq_cst);
                while (!changed()) futex_wait(epoch, seen);
                sleepers.fetch_sub(1, std::memory_order_seq_cst);
            }
            seen = epoch.load(std::memory_order_acquire);
        }
    }
    std::atomic<int> wanted_now{1};
};

// The pool is never destroyed: workers may wait in it while the process exits.
Pool* pool() {
    static Pool* p = [] {
        // Threads do not survive fork: a child starts with a fresh pool.
        pthread_atfork(nullptr, nullptr, [] {
            Pool* mine = pool();
            const int wanted = mine->wanted;
            new (mine) Pool;  // the vector of places is left behind
            mine->wanted = wanted;
            mine->wanted_now = wanted;
        });
        return new Pool;
    }();
    return p;
}

struct Start {
    Pool* pool;
    int index;
};

void start_workers(Pool* p) {
    while (p->started < p->wanted) {
        auto* start = new Start{p, p->started};
        pthread_t thread;
        const auto body = [](void* arg) -> void* {
            Start s = *static_cast<Start*>(arg);
            delete static_cast<Start*>(arg);
            s.pool->worker(s.index);
            return nullptr;
        };
        if (pthread_create(&thread, nullptr, body, start) != 0) {
            delete start;
            p->wanted = p->started;  // fewer threads are slower, not wrong
            return;
        }
        pthread_setname_np(thread, "quire-kernel");
        pthread_detach(thread);
        ++p->started;
    }
}

}  // namespace

int thread_count() { return pool()->wanted_now.load(std::memory_order_relaxed); }

void run(size_t parts, void (*fn)(void*, size_t), void* ctx) {
    Pool* p = pool();
    // If another caller uses the pool, or if this job is part of another job, the calling thread computes all parts.
    if (parts < 2 || parts >= Pool::kPartMask / 2 || thread_count() == 1 ||
        p->busy.exchange(true, std::memory_order_acquire)) {
        for (size_t i = 0; i < parts; ++i) fn(ctx, i);
        return;
    }
    if (p->started < p->wanted) start_workers(p);
    p->fn = fn;
    p->ctx = ctx;
    p->done.store(0, std::memory_order_relaxed);
    const uint64_t job = (p->ticket.load(std::memory_order_relaxed) >> (2 * Pool::kPartBits)) + 1;
    p->ticket.store(job << (2 * Pool::kPartBits) | uint64_t(parts) << Pool::kPartBits, std::memory_order_release);
    p->epoch.fetch_add(1, std::memory_order_seq_cst);
    if (p->sleepers.load(std::memory_order_seq_cst)) futex_wake(p->epoch, INT_MAX);
    uint32_t unused = 0;
    p->work(0, unused);
    const auto finished = [&] { return p->done.load(std::memory_order_acquire) == uint32_t(parts); };
    if (!spin(kCallerSpinNs, finished)) {
        p->caller_sleeps.store(1, std::memory_order_seq_cst);
        for (uint32_t seen; (seen = p->done.load(std::memory_order_seq_cst)) != uint32_t(parts);)
            futex_wait(p->done, seen);
        p->caller_sleeps.store(0, std::memory_order_seq_cst);
    }
    p->busy.store(false, std::memory_order_release);
}

void* scratch(Slot slot, size_t bytes) {
    struct Buffers {
        void* data[kSlots] = {};
        size_t size[kSlots] = {};
        ~Buffers() {
            for (void* p : data) std::free(p);
        }
    };
    static thread_local Buffers buffers;
    if (buffers.size[slot] < bytes) {
        const size_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        std::free(buffers.data[slot]);
        buffers.data[slot] = std::aligned_alloc(4096, size);
        if (!buffers.data[slot]) std::abort();
        buffers.size[slot] = size;
    }
    return buffers.data[slot];
}

}  // namespace quire

extern "C" __attribute__((visibility("default"))) void quire_set_threads(int count) {
    using namespace quire;
    if (count < 1) count = 1;
    if (count > kMaxThreads) count = kMaxThreads;
    while (pool()->busy.exchange(true, std::memory_order_acquire)) __builtin_ia32_pause();
    pool()->wanted = count;
    pool()->wanted_now = count;
    pool()->busy.store(false, std::memory_order_release);
}

extern "C" __attribute__((visibility("default"))) int quire_get_threads() { return quire::thread_count(); }

// Thread i runs on the CPUs cpus[first[i]] .. cpus[first[i + 1] - 1] from its next job on. Thread 0 is the caller of a
// job and stays where it is. count 0: the threads may run on all CPUs of `cpus`, whose number is first[0].
extern "C" __attribute__((visibility("default"))) void quire_bind_threads(const int* cpus, const int* first,
                                                                          int count) {
    using namespace quire;
    const auto set_of = [&](int from, int to) {
        cpu_set_t set;
        CPU_ZERO(&set);
        for (int i = from; i < to; ++i)
            if (cpus[i] >= 0 && cpus[i] < CPU_SETSIZE) CPU_SET(cpus[i], &set);
        return set;
    };
    Pool* p = pool();
    while (p->busy.exchange(true, std::memory_order_acquire)) __builtin_ia32_pause();
    p->places.clear();
    for (int i = 0; i < (count ? count : kMaxThreads); ++i)
        p->places.push_back(count ? set_of(first[i], first[i + 1]) : set_of(0, first[0]));
    p->places_version.fetch_add(1, std::memory_order_release);
    p->busy.store(false, std::memory_order_release);
}

// Spreads memory that this thread and threads that it starts touch first over NUMA nodes, page by page. nodes: a mask.
// Returns 0, or errno.
extern "C" __attribute__((visibility("default"))) int quire_interleave_memory(uint64_t nodes) {
    constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of linux/mempolicy.h
    const unsigned long mask = nodes;
    return syscall(SYS_set_mempolicy, kInterleave, &mask, sizeof mask * 8 + 1) == 0 ? 0 : errno;
}
