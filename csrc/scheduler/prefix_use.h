// How many calls of the scheduler, queued or in flight, begin with each prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "scheduler/types.h"

namespace parrot::scheduler {

class PrefixUse {
  public:
    // NodeIds below `num_slots` may be used from now on.
    void grow(size_t num_slots);

    // A call comes; those that watched one of its prefixes, and were alone with it, are put into `company`.
    void enter(Call& call, std::vector<Call*>& company);
    void leave(const Call& call);
    void enter_queue(const Call& call);
    void leave_queue(const Call& call);

    int32_t num_queued(NodeId node) const { return nodes_[node].num_queued; }

    // The longest prefix that another queued call has, too; kNoNode if none.
    PathEntry longest_queued(const Call& call) const;

    // What the call can share at all: tokens up to its longest prefix that another call has, and a hash of
    // its boundaries up to there. Calls of equal hash (64 bits, so that no two others meet) share the same
    // tokens with every engine.
    struct Shareable {
        int32_t tokens = 0;
        uint64_t chain = 0;
    };
    Shareable shareable(const Call& call) const;
    // The same for a call that asks to be put into company when the answer changes.
    Shareable watch(Call& call);

    // Throws std::logic_error unless the counts are those of `calls`.
    void check_invariants(const std::vector<const Call*>& calls) const;

  private:
    struct Node {
        int32_t num_calls = 0;
        int32_t num_queued = 0;
        Call* alone = nullptr;  // the only call that has it, if that one watches
    };

    std::vector<Node> nodes_;  // by NodeId
};

}  // namespace parrot::scheduler
