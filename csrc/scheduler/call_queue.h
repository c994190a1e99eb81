// The queued calls in the order in which they are placed, their task groups, and how many share a prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "scheduler/types.h"

namespace parrot::scheduler {

class CallQueue {
  public:
    using Ordered = std::map<QueueKey, Call*>;

    explicit CallQueue(const SchedulerOptions& options) : options_(options) {}

    void grow(size_t num_slots);
    void insert(Call& call);
    void erase(Call& call);

    const Ordered& ordered() const { return calls_; }
    size_t size() const { return calls_.size(); }

    // The queued members of a call's task group, in order; null when it has none.
    const Ordered* group_of(const Call& call) const;

    // The queued calls that share the longest shared prefix of `head` and its objective, `head` first,
    // looking at most kSharerWindow places behind it; a call with a task group of its own goes with that
    // instead.
    std::vector<Call*> sharers_of(Call& head, size_t limit) const;

    void check_invariants() const;

  private:
    using GroupKey = std::pair<int64_t, int64_t>;  // (app_id, group_id)

    QueueKey key_of(const CallSpec& spec) const;
    bool is_grouped(const Call& call) const;
    PathEntry longest_shared(const Call& call) const;

    SchedulerOptions options_;
    Ordered calls_;
    std::map<GroupKey, Ordered> groups_;
    std::vector<int32_t> num_queued_;  // by NodeId
};

}  // namespace parrot::scheduler
