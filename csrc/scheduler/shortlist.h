// The few of many engines that are worth a look for some calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/call_set.h"
#include "scheduler/engine.h"
#include "scheduler/fleet.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Shortlist {
  public:
    Shortlist(const SchedulerOptions& options, const Fleet& fleet) : options_(options), fleet_(fleet) {}

    // The least loaded engines, the best of those that have a prefix of the calls, the one held for the call,
    // and `besides`. `admissible` false: also engines that cannot take them now, but none that is held.
    std::span<Engine* const> find(const CallSet& calls, int64_t now_us, bool admissible,
                                  std::span<Engine* const> besides);
    // Engines with room that have a prefix of the calls and were not found: they may have room for the rest.
    std::span<Engine* const> other_holders(const CallSet& calls);

    // From now on, or no longer, the calls are much alike and placed at once one after the other: the engines
    // that are least loaded for one serve the next ones, as long as one is left that none was placed on.
    void set_alike(bool alike);

  private:
    void find_least_loaded(const CallSet& calls, int64_t now_us, bool admissible);
    void add_holders(const CallSet& calls, int64_t now_us, bool admissible);
    NodeId widest(const CallSet& calls) const;
    bool serves(const CallShape& shape, NodeId widest) const;
    bool is_new(const Engine& engine);

    SchedulerOptions options_;
    const Fleet& fleet_;
    std::vector<Engine*> found_;
    std::vector<uint64_t> seen_;  // by engine slot: the last search that had it
    uint64_t search_ = 0;
    std::vector<Engine*> holders_;  // scratch

    bool alike_ = false;
    size_t num_served_ = 0;  // by least_loaded_
    CallShape served_;       // what it was found for
    NodeId served_widest_ = kNoNode;
    std::vector<Engine*> least_loaded_;
};

}  // namespace parrot::scheduler
