// FindEngine of Algorithm 1: what it would cost to run some calls on each engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/engine.h"
#include "scheduler/fleet.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// Calls that are looked at as one, with the prefixes they share among themselves counted once.
struct CallSet {
    // `completes_together`: only the end of the last one matters (a task group), else the mean end.
    CallSet(std::span<Call* const> calls, bool completes_together);
    explicit CallSet(Call& call)
        : CallSet(std::span<Call* const>(std::initializer_list<Call*>{&call}), false) {}

    int32_t num_calls = 0;
    bool latency = false;
    bool completes_together = false;
    int64_t prompt_tokens = 0;
    int64_t new_tokens = 0;
    double decode_steps = 0;
    Path entries;  // distinct
};

class EngineFinder {
  public:
    EngineFinder(const SchedulerOptions& options, const Fleet& fleet) : options_(options), fleet_(fleet) {}

    // One candidate per engine, in the order given.
    std::vector<Candidate> evaluate(const CallSet& calls, std::span<Engine* const> engines, int64_t now_us);
    Candidate evaluate(const CallSet& calls, Engine& engine, int64_t now_us);

  private:
    struct Overlap {
        int64_t cached = 0;  // tokens of the set that the engine has, in contexts or prompts in flight
        int64_t live = 0;    // tokens of the set that calls in flight hold, so that the load grows by less
        int64_t live_latency = 0;
        int32_t prefix_len = 0;
    };

    void find_overlaps(const CallSet& calls, std::span<Engine* const> engines);
    Candidate score(const CallSet& calls, const Engine& engine, const Overlap& overlap, int64_t now_us) const;
    double harm(const CallSet& calls, const Engine& engine, double compute_us, double added_kv,
                int64_t now_us) const;
    double lost_capacity(const CallSet& calls, const Engine& engine, int64_t load_after) const;
    double crowding_of(const CallSet& calls, const Engine& engine) const;
    bool is_admissible(const CallSet& calls, const Engine& engine, const Overlap& overlap) const;
    double weight(bool latency) const;

    SchedulerOptions options_;
    const Fleet& fleet_;
    double fleet_load_ = 0;          // calls in flight by pace, of all engines
    std::vector<Overlap> overlaps_;  // by engine slot
};

// The admissible engine of the lowest score; ties go to the smaller batch, then to the lower id. -1: none.
int32_t best_admissible(std::span<const Candidate> candidates, std::span<Engine* const> engines);

// The first few candidates, admissible ones first, then by score.
std::vector<Candidate> best_first(std::vector<Candidate> candidates);

}  // namespace parrot::scheduler
