#include "kernels/cpu/parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <thread>

#include "concat.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace parrot::cpu {
namespace {

constexpr int kMaxThreads = 1024;
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kPausesPerLook = 32;  // at the clock, which costs as much as a few pauses

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Returns once `word` is no longer `value`.
void wait_while(const std::atomic<int>& word, int value) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (word.load(std::memory_order_acquire) != value) return;
            pause();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    word.wait(value, std::memory_order_acquire);
}

// One thread with the job it is offered. The caller that has claimed the worker sets kOffered; the worker
// sets kTaken, and kIdle when it has done the job; an offer not taken yet may be withdrawn.
class Worker {
  public:
    bool claim() {
        return !claimed_.load(std::memory_order_relaxed) &&
               !claimed_.exchange(true, std::memory_order_acquire);
    }

    void offer(Task task, void* context, int part) {
        task_ = task;
        context_ = context;
        part_ = part;
        state_.store(kOffered, std::memory_order_release);
        state_.notify_one();
    }

    // Returns when the part has run: here, if the worker has not begun it (its CPU is busy, or it is still
    // waking up).
    void finish_and_release() {
        int expected = kOffered;
        if (state_.compare_exchange_strong(expected, kIdle, std::memory_order_acquire)) {
            task_(context_, part_);
        } else {
            wait_while(state_, kTaken);
        }
        claimed_.store(false, std::memory_order_release);
    }

    [[noreturn]] void loop() {
        for (;;) {
            wait_while(state_, kIdle);
            int expected = kOffered;
            if (!state_.compare_exchange_strong(expected, kTaken, std::memory_order_acquire)) continue;
            task_(context_, part_);
            state_.store(kIdle, std::memory_order_release);
            state_.notify_one();
        }
    }

  private:
    static constexpr int kIdle = 0, kOffered = 1, kTaken = 2;

    alignas(64) std::atomic<int> state_{kIdle};
    std::atomic<bool> claimed_{true};  // by whoever made it
    Task task_ = nullptr;
    void* context_ = nullptr;
    int part_ = 0;
};

int available_cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::min(CPU_COUNT(&set), kMaxThreads);
#endif
    return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

// Idle threads for every caller in the process. It grows and never shrinks, and is never destroyed: its
// threads may be waiting when the process ends.
class Pool {
  public:
    // Claims up to `wanted` workers into `claimed`, starting threads if all are taken and the CPUs are not;
    // returns how many.
    int claim(int wanted, Worker** claimed) {
        int count = 0;
        const int size = size_.load(std::memory_order_acquire);
        for (int i = 0; i < size && count < wanted; ++i) {
            if (workers_[i]->claim()) claimed[count++] = workers_[i];
        }
        while (count < wanted) {
            Worker* added = grow(wanted);
            if (added == nullptr) break;
            claimed[count++] = added;
        }
        return count;
    }

  private:
    // A new worker, claimed; null when there are enough or the system refuses another thread.
    Worker* grow(int wanted) {
        const std::lock_guard lock(growth_);
        const int size = size_.load(std::memory_order_relaxed);
        if (size >= std::min(kMaxThreads, std::max(wanted, cpus_ - 1))) return nullptr;
        auto worker = std::make_unique<Worker>();
        if (!start_thread(*worker)) return nullptr;
        workers_[size] = worker.release();
        size_.store(size + 1, std::memory_order_release);
        return workers_[size];
    }

    // Signals stay with the threads that the host process made.
    static bool start_thread(Worker& worker) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool started = true;
        try {
            std::thread([&worker] { worker.loop(); }).detach();
        } catch (const std::system_error&) {
            started = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return started;
    }

    const int cpus_ = available_cpus();
    std::mutex growth_;
    std::atomic<int> size_{0};
    Worker* workers_[kMaxThreads] = {};
};

std::atomic<Pool*> g_pool{nullptr};
std::atomic<int> g_num_threads{0};

Pool& pool() {
    Pool* current = g_pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    // A child has none of its parent's threads; what they were doing is left as it is.
    static const int registered =
        pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr, std::memory_order_release); });
    static_cast<void>(registered);
    auto fresh = std::make_unique<Pool>();
    if (g_pool.compare_exchange_strong(current, fresh.get(), std::memory_order_acq_rel)) {
        return *fresh.release();
    }
    return *current;
}

}  // namespace

int num_threads() {
    const int count = g_num_threads.load(std::memory_order_relaxed);
    return count != 0 ? count : available_cpus();
}

void set_num_threads(int count) {
    if (count < 1 || count > kMaxThreads) {
        throw std::invalid_argument(concat("num_threads = ", count, " is outside [1, ", kMaxThreads, "]"));
    }
    g_num_threads.store(count, std::memory_order_relaxed);
}

void run_parts(int num_parts, Task task, void* context) {
    if (num_parts <= 1) {
        if (num_parts == 1) task(context, 0);
        return;
    }
    Worker* workers[kMaxThreads];
    const int wanted = std::min(num_parts, kMaxThreads) - 1;
    const int count = pool().claim(wanted, workers);
    for (int i = 0; i < count; ++i) workers[i]->offer(task, context, i + 1);
    task(context, 0);
    for (int part = count + 1; part < num_parts; ++part) task(context, part);
    for (int i = 0; i < count; ++i) workers[i]->finish_and_release();
}

}  // namespace parrot::cpu
