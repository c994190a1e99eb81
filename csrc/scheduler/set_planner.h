// Where the calls of one decision go: all on one engine, or spread over several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "scheduler/find_engine.h"
#include "scheduler/fleet.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// A call, the engine meant for it, and the candidates that led there.
struct Choice {
    Call* call = nullptr;
    Engine* engine = nullptr;  // null: no engine can take it now
    Candidate candidate;
    std::shared_ptr<const std::vector<Candidate>> decision;
};

class SetPlanner {
  public:
    SetPlanner(Fleet& fleet, EngineFinder& finder) : fleet_(fleet), finder_(finder) {}

    Choice choose(Call& call, int64_t now_us);

    // The best of three plans: everything on one engine; each cluster of calls that share a prefix on one;
    // each call for itself. Calls that no engine can take are left out. `completes_together`: the end of the
    // last call counts (a task group), else the mean. `num_others`: queued calls that are not in the set.
    std::vector<Choice> plan(std::span<Call* const> calls, bool completes_together, size_t num_others,
                             int64_t now_us);

  private:
    using Unit = std::vector<Call*>;
    using Plan = std::vector<Choice>;
    // What a plan in the making has put on an engine so far.
    struct Part {
        int32_t num_calls = 0;
        double decode_steps = 0;
    };

    Plan all_on_one(std::span<Call* const> calls);
    Plan spread(std::vector<Unit> units);
    void place_unit(const Unit& unit, Plan& plan, std::vector<Fleet::Admission>& admissions);
    int32_t best_engine(const CallSet& unit, std::span<const Candidate> candidates) const;
    double score(const Plan& plan);
    double end_of(const CallSet& calls, Engine& engine) const;

    Fleet& fleet_;
    EngineFinder& finder_;
    bool completes_together_ = false;
    size_t num_others_ = 0;
    int64_t now_us_ = 0;
    std::unordered_map<const Engine*, Part> parts_;
};

}  // namespace parrot::scheduler
