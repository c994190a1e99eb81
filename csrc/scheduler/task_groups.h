// The queued members of each task group, in order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/flat_map.h"
#include "scheduler/slab.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

struct TaskGroup {
    uint32_t slot = 0;
    std::vector<Call*> members;  // by key
};

class TaskGroups {
  public:
    // A call without a group number is left alone.
    void insert(Call& call);
    void erase(Call& call);
    // Members from `head` on, `head` first.
    static std::span<Call* const> from(const Call& head);

    // The number of members of all groups.
    size_t count_members() const;

  private:
    // Members are placed by one decision, hence of one lane.
    struct Key {
        Lane* lane = nullptr;
        int64_t app_id = 0;
        int64_t group_id = 0;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        uint64_t operator()(const Key& key) const {
            return mixed(mixed(static_cast<uint64_t>(key.app_id)) + static_cast<uint64_t>(key.group_id));
        }
    };

    static Key key_of(const Call& call) { return {call.lane, call.spec.app_id, call.spec.group_id}; }

    Slab<TaskGroup> groups_;
    FlatMap<Key, uint32_t, KeyHash> by_key_;
};

}  // namespace parrot::scheduler
