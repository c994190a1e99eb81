// Where the calls of one decision go: all on one engine, or spread over several.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/decisions.h"
#include "scheduler/find_engine.h"
#include "scheduler/fleet.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// A call, the engine meant for it, and the candidates that led there.
struct Choice {
    Call* call = nullptr;
    Scored scored;                // its engine null: no engine can take the call now
    uint32_t decision = kNoSlot;  // a hold on Decisions, which goes to the call or is given back
};

class SetPlanner {
  public:
    SetPlanner(const SchedulerOptions& options, Fleet& fleet, EngineFinder& finder, Decisions& decisions)
        : options_(options), fleet_(fleet), finder_(finder), decisions_(decisions) {}

    Choice choose(Call& call, int64_t now_us);
    // The best of `engines` for a call that no other can take.
    Choice choose_among(Call& call, std::span<Engine* const> engines, int64_t now_us);

    // The choice is not carried out.
    void forget(const Choice& choice) { decisions_.drop(choice.decision); }

    // The best of three plans: everything on one engine; each cluster of calls that share a prefix on one;
    // each call for itself. Without splitting the first, whenever there is one. Calls that no engine can take
    // are left out. `completes_together`: the end of the last call counts (a task group), else the mean.
    std::vector<Choice> plan(std::span<Call* const> calls, bool completes_together, int64_t now_us);

  private:
    using Unit = std::vector<Call*>;
    using Plan = std::vector<Choice>;
    // What a plan in the making has put on an engine so far.
    struct Part {
        Engine* engine = nullptr;
        int32_t num_calls = 0;
        double decode_steps = 0;
    };

    Choice choice_of(Call& call, const Scored* best);
    Plan all_on_one(std::span<Call* const> calls);
    Plan spread(std::vector<Unit> units);
    void place_unit(const Unit& unit, Plan& plan, std::vector<Fleet::Admission>& admissions);
    Part& part_of(Engine& engine);
    const Scored* best_engine(const CallSet& unit) const;
    double score(const Plan& plan);
    void sort_by_length(std::vector<Unit>& units) const;
    void discard(Plan& plan);

    SchedulerOptions options_;
    Fleet& fleet_;
    EngineFinder& finder_;
    Decisions& decisions_;
    bool completes_together_ = false;
    double num_others_ = 0;  // queued calls that are not in the set
    int64_t now_us_ = 0;
    std::vector<Scored> found_;   // scratch
    std::vector<Part> parts_;     // of the plan in the making
    std::vector<Engine*> begun_;  // their engines
};

}  // namespace parrot::scheduler
