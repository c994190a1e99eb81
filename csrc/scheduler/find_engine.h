// FindEngine of Algorithm 1: what it would cost to run some calls on each engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/decisions.h"
#include "scheduler/engine.h"
#include "scheduler/fleet.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// Calls that are looked at as one, with the prefixes they share among themselves counted once.
class CallSet {
  public:
    // `completes_together`: only the end of the last one matters (a task group), else the mean end.
    CallSet(std::span<Call* const> calls, bool completes_together);
    explicit CallSet(const Call& call);
    CallSet(const CallSet&) = delete;
    CallSet& operator=(const CallSet&) = delete;

    CallShape shape() const;

    EnginePool* pool = nullptr;
    const Call* only = nullptr;  // the call, when it is one
    int32_t num_calls = 0;
    bool latency = false;
    bool completes_together = false;
    int64_t prompt_tokens = 0;
    int64_t new_tokens = 0;
    double decode_steps = 0;
    std::span<const PathEntry> entries;  // distinct

  private:
    void add(const Call& call);

    Path merged_;  // of several calls
};

class EngineFinder {
  public:
    EngineFinder(const SchedulerOptions& options, Fleet& fleet) : options_(options), fleet_(fleet) {}

    // The engines worth a look for these calls, into `found`: of a few engines all; of many, some that have a
    // prefix of theirs, those that would score best without one, and `besides`. `admissible` false: also
    // engines that cannot take them now, but none that is held.
    void evaluate(const CallSet& calls, int64_t now_us, bool admissible, std::span<Engine* const> besides,
                  std::vector<Scored>& found);
    Scored evaluate_one(const CallSet& calls, Engine& engine, int64_t now_us) const;
    // Whether the engine can take the calls now.
    bool admits(const CallSet& calls, const Engine& engine) const;
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
    void shortlist(const CallSet& calls, int64_t now_us, bool admissible, std::span<Engine* const> besides);
    void add_holders(const CallSet& calls, const CallShape& shape, int64_t now_us, bool admissible,
                     size_t most);
    bool is_new(const Engine& engine);

    SchedulerOptions options_;
    Fleet& fleet_;
    std::vector<Engine*> shortlist_;                   // scratch
    std::vector<uint64_t> seen_;                       // by engine slot: the last search that had it
    std::vector<std::pair<double, Engine*>> holders_;  // scratch
    uint64_t search_ = 0;
};

// The admissible engine of the lowest score; ties go to the smaller batch, then to the lower id. Null: none.
const Scored* best_admissible(std::span<const Scored> candidates);

}  // namespace parrot::scheduler
