// Drives the scheduler without Python: 1 submit : 1 placement : 1 finish in steady state, and prints what it
// measured as one line of JSON. Usage: scheduler_bench WORKLOAD ENGINES QUEUED PLACEMENTS REPEATS, where
// QUEUED calls wait for full engines, or, when it is 0, engines are half full and every call is placed at
// once; scheduler_bench memory WORKLOAD QUEUED; scheduler_bench shortlist ENGINES PLACEMENTS.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

#include "bench/measure.h"
#include "scheduler/scheduler.h"

namespace {

using parrot::scheduler::CallSpec;
using parrot::scheduler::Candidate;
using parrot::scheduler::CostModel;
using parrot::scheduler::Placement;
using parrot::scheduler::Scheduler;
using parrot::scheduler::SchedulerOptions;
using Clock = std::chrono::steady_clock;

constexpr int32_t kPrompt = 200;
constexpr int32_t kHead = 128;
constexpr int32_t kNew = 50;
constexpr int32_t kBatch = 16;
constexpr int64_t kGroup = 8;

struct Workload {
    std::string name;
    int64_t num_heads = 0;    // distinct prefixes of kHead tokens; 0: prompts without a boundary
    int64_t num_tenants = 1;  // that take turns
    int64_t num_lengths = 1;  // prompts differ by so many tokens
    bool groups = false;      // task groups of kGroup
    bool aged = false;        // calls wait for several aging times
    bool tight = false;       // tokens bound an engine, and some stay free, too few for a call
    bool mixed = false;       // every eighth call is latency-bound
};

Workload workload_named(const std::string& name) {
    if (name == "alone") return {.name = name};
    if (name == "prefixes") return {.name = name, .num_heads = 100'000};
    if (name == "hot") return {.name = name, .num_heads = 8};
    if (name == "groups") return {.name = name, .num_heads = 100'000, .groups = true};
    if (name == "all") {
        return {.name = name, .num_heads = 100'000, .num_tenants = 50, .groups = true, .aged = true};
    }
    if (name == "tight") return {.name = name, .num_lengths = 8, .tight = true};
    if (name == "tight-prefixes") {
        return {.name = name, .num_heads = 200, .num_tenants = 50, .num_lengths = 8, .tight = true};
    }
    if (name == "mixed") return {.name = name, .num_tenants = 50, .num_lengths = 8, .mixed = true};
    throw std::invalid_argument("no workload " + name);
}

uint64_t scrambled(uint64_t value) {
    value += 0x9e3779b97f4a7c15ULL;
    value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9ULL;
    value = (value ^ value >> 27) * 0x94d049bb133111ebULL;
    return value ^ value >> 31;
}

// Calls to come, made before the clock starts.
class Prompts {
  public:
    explicit Prompts(const Workload& workload) : workload_(workload) {}

    void make(int64_t first, int64_t count) {
        first_ = first;
        tokens_.resize(static_cast<size_t>(count * kPrompt));
        for (int64_t i = 0; i < count; ++i) fill(first + i, &tokens_[static_cast<size_t>(i * kPrompt)]);
    }

    std::span<const int32_t> tokens(int64_t call) const {
        const auto length = static_cast<size_t>(kPrompt - call % workload_.num_lengths);
        return {&tokens_[static_cast<size_t>((call - first_) * kPrompt)], length};
    }

  private:
    void fill(int64_t call, int32_t* to) const {
        const auto unit = static_cast<uint64_t>(workload_.groups ? call / kGroup : call);
        const auto heads = static_cast<uint64_t>(std::max<int64_t>(1, workload_.num_heads));
        const uint64_t head = scrambled(unit) % heads;
        for (uint64_t i = 0; i < kPrompt; ++i) {
            const bool is_shared = workload_.num_heads > 0 && i < kHead;
            const uint64_t source = is_shared ? head << 20 | i : ~(static_cast<uint64_t>(call) << 20 | i);
            to[i] = static_cast<int32_t>(scrambled(source) % 30'000);
        }
    }

    Workload workload_;
    int64_t first_ = 0;
    std::vector<int32_t> tokens_;
};

class Driver {
  public:
    Driver(const Workload& workload, int64_t num_engines)
        : workload_(workload), scheduler_({}, {1, 2}, false), prompts_(workload) {
        const int64_t tight = kBatch * (kPrompt + kNew) + (kPrompt + kNew) / 2;
        for (int64_t id = 0; id < num_engines; ++id) {
            scheduler_.add_engine(id, 0,
                                  {.base_us = 8'000,
                                   .per_sequence_us = 40,
                                   .per_prefill_token_us = 25,
                                   .per_kv_token_us = 0.1,
                                   .capacity_tokens = workload.tight ? tight : 64'000,
                                   .max_batch_size = workload.tight ? 4 * kBatch : kBatch});
        }
        keep_contexts(num_engines);
    }

    // Engines keep four finished contexts each; the oldest of all goes first.
    void keep_contexts(int64_t num_engines) { max_contexts_ = static_cast<size_t>(4 * num_engines); }
    void prepare(int64_t count) { prompts_.make(next_, count); }

    void submit() {
        const int64_t call = next_++;
        const CallSpec spec{.call_id = call,
                            .app_id = call / kGroup,
                            .app_arrival_us = now_us_,
                            .submit_us = now_us_,
                            .scope = {},
                            .tenant = call / kGroup % workload_.num_tenants,
                            .group_id = workload_.groups ? 0 : -1,
                            .depth = 0,
                            .max_new_tokens = kNew,
                            .latency = workload_.mixed && call % 8 == 0};
        const std::span<const int32_t> tokens = prompts_.tokens(call);
        const int32_t boundaries[] = {kHead, static_cast<int32_t>(tokens.size())};
        scheduler_.submit(spec, tokens, std::span(boundaries).first(workload_.num_heads > 0 ? 2 : 0));
    }

    size_t schedule() {
        const std::vector<Placement> placements = scheduler_.schedule(now_us_);
        for (const Placement& placement : placements) {
            in_flight_.push_back({placement.call_id, placement.engine_id});
        }
        return placements.size();
    }

    void finish() {
        const auto [call, engine] = in_flight_.front();
        in_flight_.pop_front();
        int64_t context = 0;
        if (workload_.num_heads > 0) {
            context = call + 1;
            if (contexts_.size() == max_contexts_) {
                scheduler_.forget_context(contexts_.front().engine, contexts_.front().id, 0);
                contexts_.pop_front();
            }
            contexts_.push_back({context, engine});
        }
        scheduler_.finish(call, now_us_, context, kPrompt + kNew);
    }

    void pass_time(int64_t us) { now_us_ += us; }
    int64_t round() const { return workload_.groups ? kGroup : 1; }
    Scheduler& scheduler() { return scheduler_; }
    size_t num_in_flight() const { return in_flight_.size(); }

  private:
    struct Holder {
        int64_t id;
        int64_t engine;
    };

    Workload workload_;
    Scheduler scheduler_;
    Prompts prompts_;
    int64_t next_ = 0;
    int64_t now_us_ = 0;
    std::deque<Holder> in_flight_;
    std::deque<Holder> contexts_;
    size_t max_contexts_ = 0;
};

// Of this thread: what the rate would be with the core to itself.
double cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double percentile(std::vector<double>& values, double percent) {
    std::sort(values.begin(), values.end());
    const auto at = static_cast<size_t>(static_cast<double>(values.size()) * percent / 100);
    return values[std::min(at, values.size() - 1)];
}

void print_times(const char* name, std::vector<double>& times) {
    std::printf(", \"%s_us\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}", name, percentile(times, 50),
                percentile(times, 99), percentile(times, 100));
}

void print_rates(const char* name, std::vector<double>& rates) {
    std::printf(", \"%s\": {\"median\": %.0f, \"least\": %.0f, \"most\": %.0f}", name, percentile(rates, 50),
                percentile(rates, 0), percentile(rates, 100));
}

template <class Event>
void timed(std::vector<double>& times, Event event) {
    const auto start = Clock::now();
    event();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
}

void fill(Driver& driver, int64_t num_engines, int64_t num_queued) {
    const int64_t in_flight = num_queued > 0 ? num_engines * kBatch : num_engines * kBatch / 2;
    driver.prepare(in_flight + num_queued);
    for (int64_t i = 0; i < in_flight; ++i) driver.submit();
    driver.schedule();
    for (int64_t i = 0; i < num_queued; ++i) driver.submit();
    driver.schedule();
}

int measure(const Workload& workload, int64_t num_engines, int64_t num_queued, int64_t placements,
            int repeats) {
    Driver driver(workload, num_engines);
    fill(driver, num_engines, num_queued);
    const int64_t size = driver.round();
    const int64_t rounds = placements / size;
    // A call waits for as many rounds as there are queued calls; aged calls for 30 s of them.
    const int64_t round_us =
        workload.aged ? 30'000'000 * size / std::max<int64_t>(1, num_queued) : 500 * size;
    std::vector<double> rates;
    std::vector<double> cpu_rates;
    std::vector<double> submits;
    std::vector<double> schedules;
    std::vector<double> finishes;
    size_t placed = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        driver.prepare(rounds * size);
        placed = 0;
        const auto start = Clock::now();
        const double cpu_start = cpu_seconds();
        for (int64_t i = 0; i < rounds; ++i) {
            driver.pass_time(round_us);
            for (int64_t j = 0; j < size; ++j) driver.finish();
            for (int64_t j = 0; j < size; ++j) driver.submit();
            placed += driver.schedule();
        }
        rates.push_back(static_cast<double>(placed) /
                        std::chrono::duration<double>(Clock::now() - start).count());
        cpu_rates.push_back(static_cast<double>(placed) / (cpu_seconds() - cpu_start));
        driver.prepare(rounds * size);
        for (int64_t i = 0; i < rounds; ++i) {
            driver.pass_time(round_us);
            for (int64_t j = 0; j < size; ++j) timed(finishes, [&] { driver.finish(); });
            for (int64_t j = 0; j < size; ++j) timed(submits, [&] { driver.submit(); });
            timed(schedules, [&] { driver.schedule(); });
        }
    }
    driver.scheduler().check_invariants();
    const auto& counters = driver.scheduler().counters();
    std::printf("{\"calls\": \"%s\", \"engines\": %lld, \"queued\": %zu, \"in_flight\": %zu, \"placed\": %zu",
                workload.name.c_str(), static_cast<long long>(num_engines), driver.scheduler().num_queued(),
                driver.num_in_flight(), placed);
    print_rates("placements_per_s", rates);
    print_rates("placements_per_cpu_s", cpu_rates);
    print_times("submit", submits);
    print_times("schedule", schedules);
    print_times("finish", finishes);
    std::printf(
        ", \"counters\": {\"group\": %lld, \"sharers\": %lld, \"prefix\": %lld, \"alone\": %lld, "
        "\"splits\": %lld, \"holds\": %lld}}\n",
        static_cast<long long>(counters.placed_group), static_cast<long long>(counters.placed_sharers),
        static_cast<long long>(counters.placed_prefix), static_cast<long long>(counters.placed_alone),
        static_cast<long long>(counters.splits), static_cast<long long>(counters.holds));
    return 0;
}

int weigh(const Workload& workload, int64_t num_queued) {
    Driver driver(workload, 0);
    driver.prepare(num_queued);
    const int64_t before = parrot::bench::resident_bytes();
    for (int64_t i = 0; i < num_queued; ++i) driver.submit();
    driver.schedule();
    const int64_t after = parrot::bench::resident_bytes();
    std::printf("{\"calls\": \"%s\", \"queued\": %lld, \"bytes_per_queued_call\": %.1f}\n",
                workload.name.c_str(), static_cast<long long>(num_queued),
                static_cast<double>(after - before) / static_cast<double>(num_queued));
    return 0;
}

// How much worse than the best engine of a full scan the chosen one is, on a fleet of many kinds of engines
// with a few hot prefixes.
int compare(int64_t num_engines, int64_t placements) {
    const Workload workload{.name = "shortlist", .num_heads = 40, .num_lengths = 64, .mixed = true};
    Driver driver(workload, 0);
    for (int64_t id = 0; id < num_engines; ++id) {
        const auto part = [&](uint64_t salt) {
            return 0.5 + static_cast<double>(scrambled(static_cast<uint64_t>(id) * 8 + salt) % 1'000) / 500;
        };
        driver.scheduler().add_engine(id, 0,
                                      {.base_us = 8'000 * part(0),
                                       .per_sequence_us = 40 * part(1),
                                       .per_prefill_token_us = 25 * part(2),
                                       .per_kv_token_us = 0.1 * part(3),
                                       .capacity_tokens = static_cast<int64_t>(32'000 * part(4)),
                                       .max_batch_size = kBatch});
    }
    driver.keep_contexts(num_engines);
    std::vector<double> excess;
    std::vector<double> times;
    driver.prepare(placements);
    for (int64_t i = 0; i < placements; ++i) {
        driver.pass_time(200);
        if (static_cast<int64_t>(driver.num_in_flight()) > num_engines * 10) driver.finish();
        driver.submit();
        const Candidate best = driver.scheduler().explain(i).front();
        timed(times, [&] { driver.schedule(); });
        const auto chosen = driver.scheduler().explain(i).front();
        excess.push_back(chosen.score_us / best.score_us - 1);
    }
    std::printf("{\"engines\": %lld, \"excess\": {\"p50\": %.6f, \"p99\": %.6f, \"max\": %.6f}",
                static_cast<long long>(num_engines), percentile(excess, 50), percentile(excess, 99),
                percentile(excess, 100));
    print_times("schedule", times);
    std::printf("}\n");
    return 0;
}

int run(const std::vector<std::string>& words) {
    const auto number = [&](size_t i) { return std::atoll(words.at(i).c_str()); };
    if (words.at(0) == "memory") return weigh(workload_named(words.at(1)), number(2));
    if (words.at(0) == "shortlist") return compare(number(1), number(2));
    return measure(workload_named(words.at(0)), number(1), number(2), number(3), static_cast<int>(number(4)));
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run({argv + 1, argv + argc});
    } catch (const std::exception& error) {
        std::fprintf(stderr, "scheduler_bench: %s\n", error.what());
        return 1;
    }
}
