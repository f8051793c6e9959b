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

// `count` things in ranges of at least `grain`: a few ranges per thread, so that a disturbed thread can fall behind.
template <class Body>
void parallel_ranges(size_t count, size_t grain, Body body) {
    if (count == 0) return;
    size_t ranges = size_t(thread_count()) * 4;
    if (thread_count() == 1) ranges = 1;
    if (ranges > count / grain) ranges = count / grain;
    if (ranges < 1) ranges = 1;
    parallel(ranges, [&](size_t i) { body(count * i / ranges, count * (i + 1) / ranges); });
}

}  // namespace quire
