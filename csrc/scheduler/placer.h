// Algorithm 1 of the paper (section 5.4): queued calls onto engines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scheduler/call_queue.h"
#include "scheduler/find_engine.h"
#include "scheduler/fleet.h"
#include "scheduler/set_planner.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Placer {
  public:
    Placer(const SchedulerOptions& options, Fleet& fleet, CallQueue& queue, Counters& counters)
        : options_(options),
          fleet_(fleet),
          queue_(queue),
          counters_(counters),
          finder_(options, fleet),
          planner_(fleet, finder_) {}

    // Places what can be placed now, in queue order; the rest stays queued.
    std::vector<Placement> run(int64_t now_us);

    // Every engine for one call, best first.
    std::vector<Candidate> candidates_of(Call& call, int64_t now_us);

  private:
    // Calls that are placed by one decision.
    struct Companions {
        std::vector<Call*> calls;
        Reason reason = Reason::kAlone;
    };

    bool has_room() const;
    size_t num_free_places() const;
    void place_from(Call& head);
    Companions companions_of(Call& head) const;
    void place_set(const Companions& set);
    void commit(const Choice& choice, Reason reason);
    void count(Reason reason);
    void hold_engine_for(Call& call);

    SchedulerOptions options_;
    Fleet& fleet_;
    CallQueue& queue_;
    Counters& counters_;
    EngineFinder finder_;
    SetPlanner planner_;
    uint64_t pass_ = 0;
    int64_t now_us_ = 0;
    std::vector<Placement> placements_;
};

}  // namespace parrot::scheduler
