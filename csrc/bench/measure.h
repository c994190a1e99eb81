// What the drivers of the benchmarks have in common: times of single events, resident memory, JSON.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <string>
#include <utility>
#include <vector>

namespace parrot::bench {

inline int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline int64_t resident_bytes() {
    long pages = 0, resident = 0;
    if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
        if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
        std::fclose(file);
    }
    return int64_t{resident} * sysconf(_SC_PAGESIZE);
}

// How long each of many events took, the reading of the clock (some 25 ns) included.
class Times {
  public:
    // Room for `count` events, so that recording allocates nothing.
    explicit Times(size_t count) : times_ns_(count) {}

    template <class Event>
    void time(Event event) {
        const int64_t start = now_ns();
        event();
        const int64_t took = now_ns() - start;
        times_ns_[num_events_++] = static_cast<uint32_t>(std::min<int64_t>(took, UINT32_MAX));
        if (took > longest_ns_ && !was_preempted()) longest_ns_ = took;
    }

    // {"p50_us": .., "p99_us": .., "max_us": ..}, nearest rank. The maximum is that of events during which
    // the system ran nothing else in this thread's place; the percentiles are of all.
    std::string json() {
        std::sort(times_ns_.begin(), times_ns_.begin() + static_cast<std::ptrdiff_t>(num_events_));
        char text[128];
        std::snprintf(text, sizeof(text), R"({"p50_us": %.3f, "p99_us": %.3f, "max_us": %.1f})",
                      at_rank(50) / 1e3, at_rank(99) / 1e3, static_cast<double>(longest_ns_) / 1e3);
        return text;
    }

  private:
    // Since the last time it was asked.
    bool was_preempted() {
        rusage usage{};
        getrusage(RUSAGE_THREAD, &usage);
        return std::exchange(num_preemptions_, usage.ru_nivcsw) != usage.ru_nivcsw;
    }

    double at_rank(size_t percent) const {
        const size_t rank = (num_events_ * percent + 99) / 100;
        return num_events_ == 0 ? 0 : times_ns_[std::max<size_t>(rank, 1) - 1];
    }

    std::vector<uint32_t> times_ns_;
    size_t num_events_ = 0;
    int64_t longest_ns_ = 0;
    long num_preemptions_ = 0;
};

inline double cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// `count` events per second of this thread's time, so that what else runs on the machine takes no part of it.
template <class Events>
double rate_of(size_t count, Events events) {
    const double start = cpu_seconds();
    events();
    return static_cast<double>(count) / (cpu_seconds() - start);
}

// One flat object, printed as a line.
class Json {
  public:
    void add(const char* name, const std::string& value) {
        text_ += (text_.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + value;
    }
    void add(const char* name, double value) { add(name, std::to_string(value)); }
    void print() const { std::printf("%s}\n", text_.c_str()); }

  private:
    std::string text_;
};

}  // namespace parrot::bench
