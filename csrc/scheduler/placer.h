// Algorithm 1 of the paper (section 5.4): queued calls onto engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/call_queue.h"
#include "scheduler/decisions.h"
#include "scheduler/find_engine.h"
#include "scheduler/fleet.h"
#include "scheduler/set_planner.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Placer {
  public:
    Placer(const SchedulerOptions& options, Fleet& fleet, CallQueue& queue, Decisions& decisions,
           Counters& counters)
        : options_(options),
          fleet_(fleet),
          queue_(queue),
          counters_(counters),
          finder_(options, fleet),
          planner_(options, fleet, finder_, decisions) {}

    // Places what can be placed now, in queue order; the rest stays queued.
    std::vector<Placement> run(int64_t now_us);
    // The engine that is kept free for the call, if one is, is no more.
    void end_hold(Call& call);

    // Every engine for one call, best first.
    std::vector<Candidate> candidates_of(const Call& call, int64_t now_us) const;
    // Those of them that are worth a look, of many engines a shortlist.
    std::vector<Candidate> shortlist_of(const Call& call, int64_t now_us);

  private:
    // Calls that are placed by one decision.
    struct Companions {
        std::vector<Call*> calls;
        Reason reason = Reason::kAlone;
    };

    void run_pass();
    void place_holders();
    bool free_left_engines();
    void place_from(Call& head);
    void place_companions(Call& head, const Choice* choice);
    bool may_open_set(const Call& head) const;
    void commit_alone(const Choice& choice);
    Choice choose(Call& head);
    Companions companions_of(Call& head) const;
    void place_set(const Companions& set);
    void commit(const Choice& choice, Reason reason);
    void count(Reason reason);
    void hold_an_engine();

    SchedulerOptions options_;
    Fleet& fleet_;
    CallQueue& queue_;
    Counters& counters_;
    EngineFinder finder_;
    SetPlanner planner_;
    int64_t now_us_ = 0;
    std::vector<Call*> holders_;  // calls for which an engine is kept free, first come first
    std::vector<Engine*> left_;   // engines whose holder was placed elsewhere in this pass
    std::vector<Placement> placements_;
};

}  // namespace parrot::scheduler
