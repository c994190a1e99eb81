#include "scheduler/task_groups.h"

#include <algorithm>

namespace parrot::scheduler {

namespace {

constexpr size_t kMaxKept = 64;  // of an empty group's memory, so many places are kept for the next one

auto position(const std::vector<Call*>& members, const QueueKey& key) {
    return std::ranges::lower_bound(members, key, {}, &Call::key);
}

}  // namespace

void TaskGroups::insert(Call& call) {
    if (call.spec.group_id < 0) return;
    const auto [slot, is_new] = by_key_.insert(key_of(call), 0);
    if (is_new) *slot = groups_.take();
    TaskGroup& group = groups_[*slot];
    group.slot = *slot;
    call.group = &group;
    group.members.insert(position(group.members, call.key), &call);
}

void TaskGroups::erase(Call& call) {
    if (call.group == nullptr) return;
    TaskGroup& group = *call.group;
    group.members.erase(position(group.members, call.key));
    call.group = nullptr;
    if (!group.members.empty()) return;
    by_key_.erase(key_of(call));
    if (group.members.capacity() > kMaxKept) {
        groups_.give(group.slot);
    } else {
        groups_.give_as_is(group.slot);
    }
}

std::span<Call* const> TaskGroups::from(const Call& head) {
    const std::vector<Call*>& members = head.group->members;
    return {position(members, head.key), members.end()};
}

size_t TaskGroups::count_members() const {
    size_t members = 0;
    by_key_.for_each([&](const Key&, uint32_t slot) { members += groups_[slot].members.size(); });
    return members;
}

}  // namespace parrot::scheduler
