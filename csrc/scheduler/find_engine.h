// FindEngine of Algorithm 1: what it would cost to run some calls on each engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/call_set.h"
#include "scheduler/decisions.h"
#include "scheduler/engine.h"
#include "scheduler/fleet.h"
#include "scheduler/shortlist.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class EngineFinder {
  public:
    EngineFinder(const SchedulerOptions& options, Fleet& fleet)
        : options_(options), fleet_(fleet), shortlist_(options, fleet) {}

    // The engines worth a look for these calls, into `found`: of a few engines all; of many, some that have a
    // prefix of theirs, those that would score best without one, and `besides`. `admissible` false: also
    // engines that cannot take them now, but none that is held.
    void evaluate(const CallSet& calls, int64_t now_us, bool admissible, std::span<Engine* const> besides,
                  std::vector<Scored>& found);
    // See Shortlist.
    void set_alike(bool alike) { shortlist_.set_alike(alike); }
    Scored evaluate_one(const CallSet& calls, Engine& engine, int64_t now_us) const;
    // Whether the engine can take the calls now.
    bool admits(const CallSet& calls, const Engine& engine) const;
    bool admits_plainly(const CallSet& calls) const { return calls.pool->admits_plainly(calls.shape()); }
    // All engines for one call.
    std::vector<Candidate> evaluate_all(const CallSet& calls, int64_t now_us) const;

  private:
    struct Overlap {
        int64_t cached = 0;  // tokens of the set that the engine has, in contexts or prompts in flight
        int64_t live = 0;    // tokens of the set that calls in flight hold, so that the load grows by less
        int64_t live_latency = 0;
        int32_t prefix_len = 0;
    };

    Overlap overlap_of(const CallSet& calls, const Engine& engine) const;
    Scored score(const CallSet& calls, Engine& engine, const Overlap& overlap, int64_t now_us) const;
    double harm(const CallSet& calls, const Engine& engine, double compute_us, double added_kv,
                int64_t now_us) const;
    double lost_capacity(const CallSet& calls, const Engine& engine, int64_t load_after) const;
    double crowding_of(const CallSet& calls, const Engine& engine) const;
    bool is_admissible(const CallSet& calls, const Engine& engine, const Overlap& overlap) const;
    double weight(bool latency) const;
    SchedulerOptions options_;
    Fleet& fleet_;
    Shortlist shortlist_;
};

// The admissible engine of the lowest score; ties go to the smaller batch, then to the lower id. Null: none.
const Scored* best_admissible(std::span<const Scored> candidates);

}  // namespace parrot::scheduler
