#include "scheduler/call_queue.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace parrot::scheduler {

namespace {

// An application keeps the place of its arrival for this many aging times. Without an end, one that lives for
// ever would keep every later stranger waiting.
constexpr int64_t kInheritedAgings = 6;

// How far behind the head sharers are looked for: bounds both the work and how many calls are overtaken.
constexpr int kSharerWindow = 256;

bool has_prefix(const Call& call, const PathEntry& prefix) {
    const auto step =
        std::lower_bound(call.path.begin(), call.path.end(), prefix.length,
                         [](const PathEntry& entry, int32_t length) { return entry.length < length; });
    return step != call.path.end() && step->node == prefix.node;
}

}  // namespace

// A latency-bound call, and a member of a task group (whose consumer is latency-bound), goes by its arrival;
// other work goes as if it had come one aging time later, so that latency-bound strangers overtake it for
// that long and no longer. Keys never change with time: waiting is what makes an old key small.
QueueKey CallQueue::key_of(const CallSpec& spec) const {
    int64_t priority_us = spec.submit_us;
    if (options_.application_order) {
        const int64_t oldest = spec.submit_us - kInheritedAgings * options_.aging_us;
        priority_us = std::max(std::min(spec.app_arrival_us, spec.submit_us), oldest);
    }
    const bool somebody_waits = spec.latency || spec.group_id >= 0;
    if (options_.objective_aware && !somebody_waits) priority_us += options_.aging_us;
    return {priority_us, -spec.depth, spec.call_id};
}

void CallQueue::grow(size_t num_slots) { num_queued_.resize(std::max(num_queued_.size(), num_slots)); }

void CallQueue::insert(Call& call) {
    call.key = key_of(call.spec);
    calls_.emplace(call.key, &call);
    if (call.spec.group_id >= 0) groups_[{call.spec.app_id, call.spec.group_id}].emplace(call.key, &call);
    for (const PathEntry& step : call.path) ++num_queued_[step.node];
}

void CallQueue::erase(Call& call) {
    calls_.erase(call.key);
    const auto group = groups_.find({call.spec.app_id, call.spec.group_id});
    if (group != groups_.end()) {
        group->second.erase(call.key);
        if (group->second.empty()) groups_.erase(group);
    }
    for (const PathEntry& step : call.path) --num_queued_[step.node];
}

const CallQueue::Ordered* CallQueue::group_of(const Call& call) const {
    const auto group = groups_.find({call.spec.app_id, call.spec.group_id});
    return group == groups_.end() ? nullptr : &group->second;
}

std::vector<Call*> CallQueue::sharers_of(Call& head, size_t limit) const {
    std::vector<Call*> sharers{&head};
    const PathEntry shared = longest_shared(head);
    if (shared.node == kNoNode) return sharers;
    auto next = calls_.upper_bound(head.key);
    for (int seen = 0; seen < kSharerWindow && next != calls_.end() && sharers.size() < limit;
         ++seen, ++next) {
        Call& call = *next->second;
        const bool joins = call.spec.latency == head.spec.latency && call.tried_pass != head.tried_pass &&
                           !is_grouped(call) && has_prefix(call, shared);
        if (joins) sharers.push_back(&call);
    }
    return sharers;
}

bool CallQueue::is_grouped(const Call& call) const {
    if (!options_.group_placement) return false;
    const Ordered* group = group_of(call);
    return group != nullptr && group->size() > 1;
}

PathEntry CallQueue::longest_shared(const Call& call) const {
    const auto shared = std::find_if(call.path.rbegin(), call.path.rend(),
                                     [&](const PathEntry& step) { return num_queued_[step.node] > 1; });
    return shared == call.path.rend() ? PathEntry{} : *shared;
}

void CallQueue::check_invariants() const {
    std::vector<int32_t> expected(num_queued_.size());
    size_t grouped = 0;
    for (const auto& [key, call] : calls_) {
        if (key != call->key || call->engine != nullptr) {
            throw std::logic_error("call " + std::to_string(key.call_id) + " is not where the queue has it");
        }
        if (call->spec.group_id >= 0) ++grouped;
        for (const PathEntry& step : call->path) ++expected[step.node];
    }
    size_t members = 0;
    for (const auto& [key, group] : groups_) members += group.size();
    if (members != grouped) throw std::logic_error("task groups hold " + std::to_string(members) + " calls");
    if (expected != num_queued_) throw std::logic_error("the count of queued calls at a prefix is off");
}

}  // namespace parrot::scheduler
