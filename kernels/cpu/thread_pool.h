// The thread pool and the scratch memory that all kernels share.
//
// Contract: `run` calls fn(ctx, part) once for each part in [0, parts) and returns when all calls have returned. The
// calling thread computes parts too. Any thread may compute any part, so each part must have its own outputs. An idle
// worker spins for some tens of microseconds (the gap between two operations of one model step) and then sleeps on a
// futex. A worker that the system has not scheduled delays no other thread: threads claim parts, and no part is
// assigned.
#pragma once
#include <cstddef>

#include "shared_symbols.h"

namespace quire {

SHARED int thread_count();
SHARED void run(size_t parts, void (*fn)(void*, size_t), void* ctx);

// Returns thread-local memory of at least `bytes`, 64-byte aligned, contents undefined. There is one buffer per thread
// and slot. A later call for the same slot may free it and allocate a larger one.
enum Slot { kPackedRows, kPlan, kPartials, kTile, kCandidates, kProbabilities, kActivations, kExperts, kSlots };
SHARED void* scratch(Slot slot, size_t bytes);

template <class Body>
void parallel(size_t parts, Body body) {
    if (parts == 1) {
        body(size_t(0));
        return;
    }
    run(parts, [](void* ctx, size_t part) { (*static_cast<Body*>(ctx))(part); }, &body);
}

// Calls body(begin, end) for contiguous ranges of [0, count): a large range for each thread, because the start of a
// range finds nothing prefetched, and then a small range for each, so that other threads can take over work from a
// thread that was interrupted or woke late. grain: the least number of elements for another thread.
template <class Body>
void parallel_ranges(size_t count, size_t grain, Body body) {
    if (count == 0) return;
    size_t threads = size_t(thread_count());
    if (threads > count / grain) threads = count / grain;
    if (threads < 2) return body(size_t(0), count);
    const size_t even = count / threads, share = (count * 7 + threads * 4) / (threads * 8);
    const size_t large = share < even ? share : even, left = count - large * threads;
    const size_t small = left < threads ? left : threads;
    parallel(threads + small, [&](size_t i) {
        if (i < threads) return body(large * i, large * (i + 1));
        i -= threads;
        body(large * threads + left * i / small, large * threads + left * (i + 1) / small);
    });
}

}  // namespace quire
