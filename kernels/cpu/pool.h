// The thread pool and the scratch memory that every kernel shares.
//
// Contract: `run` calls fn(ctx, part) once for each part in [0, parts) and returns when all are done. The calling
// thread takes part. Which thread computes a part never matters to the result, so kernels must give each part its own
// outputs. An idle worker spins for some tens of microseconds (the gap between two operations of one model step) and
// then sleeps in the kernel. A worker that the system has not scheduled holds nobody up: parts are claimed, not dealt.
#pragma once
#include <cstddef>

namespace quire {

int thread_count();
void run(size_t parts, void (*fn)(void*, size_t), void* ctx);

// Thread-local memory, 64-byte aligned, at least `bytes` long, contents undefined. One buffer per (thread, slot); a
// later call for the same slot may move it.
enum Slot { kPackedRows, kPlan, kPartials, kTile, kCandidates, kProbabilities, kActivations, kSlots };
void* scratch(Slot slot, size_t bytes);

template <class Body>
void parallel(size_t parts, Body body) {
    if (parts == 1) {
        body(size_t(0));
        return;
    }
    run(parts, [](void* ctx, size_t part) { (*static_cast<Body*>(ctx))(part); }, &body);
}

// `count` things in contiguous ranges: a large one for each thread, because the start of a range finds nothing fetched,
// and then a small one for each, so that a thread which was disturbed or woke late can be relieved. `grain` is the
// least number that is worth another thread.
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
