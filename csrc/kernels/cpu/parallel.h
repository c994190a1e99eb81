// Fork and join over a few threads, for kernels that take microseconds.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace parrot::cpu {

// How many threads a kernel uses unless told otherwise: the CPUs that this process may run on, until set.
int num_threads();

// Throws std::invalid_argument unless 1 <= count <= 1024.
void set_num_threads(int count);

using Task = void (*)(void* context, int part);

// Calls task(context, part) once for every part of [0, num_parts), of which the caller runs part 0, and
// returns when all have ended. Parts run on idle threads of a pool that the process shares; those that no
// thread has begun when the caller is done with its own (another engine of the process is computing, or the
// CPU is busy) run on the caller: a part must not wait for another. Hand out work in pieces from a
// WorkCounter, and a late thread costs little. Tasks do not throw. Threads wait by spinning for some tens of
// microseconds, then asleep. Works in a forked child: the child starts threads of its own.
void run_parts(int num_parts, Task task, void* context);

// run_parts with a callable: body(part).
template <class Body>
void parallel(int num_parts, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    run_parts(
        num_parts, [](void* context, int part) { (*static_cast<Callable*>(context))(part); },
        const_cast<void*>(static_cast<const void*>(&body)));
}

// Items of [0, total) to whoever asks next. Each item has to give the same result on every thread.
class WorkCounter {
  public:
    explicit WorkCounter(int64_t total) : total_(total) {}

    // False when all are taken.
    bool next(int64_t& item) {
        item = next_.fetch_add(1, std::memory_order_relaxed);
        return item < total_;
    }

  private:
    alignas(64) std::atomic<int64_t> next_{0};
    const int64_t total_;
};

// The part'th of num_parts even slices of [0, total).
struct Slice {
    int64_t begin, end;
};
inline Slice slice_of(int64_t total, int part, int num_parts) {
    return {total * part / num_parts, total * (part + 1) / num_parts};
}

}  // namespace parrot::cpu
