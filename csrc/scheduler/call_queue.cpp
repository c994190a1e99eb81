#include "scheduler/call_queue.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/engine_pool.h"
#include "scheduler/errors.h"

namespace parrot::scheduler {

namespace {

// An application keeps the place of its arrival until its calls have run for this many aging times: one that
// waits for its turn does not lose it by that, but one that never ends does not keep strangers waiting for
// ever.
constexpr int64_t kInheritedAgings = 6;

// Without aging, work that nobody waits for comes after everything else.
constexpr int64_t kNever = int64_t{1} << 61;

// How far behind the head sharers are looked for: bounds both the work and how many calls are overtaken.
constexpr int kSharerWindow = 256;

bool has_prefix(const Call& call, const PathEntry& prefix) {
    const auto step = std::ranges::lower_bound(call.path, prefix.length, {}, &PathEntry::length);
    return step != call.path.end() && step->node == prefix.node;
}

}  // namespace

void CallQueue::enter(Call& call) {
    company_.clear();
    use_.enter(call, company_);
    for (Call* other : company_) {
        if (other->engine == nullptr && !other->fresh) make_known(*other);
    }
    insert(call);
}

void CallQueue::leave(Call& call) {
    if (call.engine == nullptr) erase(call);
    use_.leave(call);
}

void CallQueue::require_place(int64_t tenant) const {
    if (size_ >= static_cast<size_t>(options_.max_queued)) throw QueueFull("max_queued", options_.max_queued);
    if (tenants_.num_queued(tenant) >= options_.max_queued_per_tenant) {
        throw QueueFull("max_queued_per_tenant", options_.max_queued_per_tenant, tenant);
    }
}

// A latency-bound call, and a member of a task group (whose consumer is latency-bound), goes by its arrival;
// other work goes as if it had come one aging time later, so that latency-bound strangers overtake it for
// that long and no longer; a call with a target in time lies between them, as late as it may start. Keys
// never change with time: waiting is what makes an old key small.
QueueKey CallQueue::key_of(const CallSpec& spec) const {
    int64_t priority_us = spec.submit_us;
    if (options_.application_order) {
        priority_us = std::min(spec.app_arrival_us, spec.submit_us);
        const int64_t kept_us = kInheritedAgings * options_.aging_us;
        const int64_t ran_us = spec.app_ran_us == kNoTime ? spec.submit_us - priority_us : spec.app_ran_us;
        if (options_.aging && ran_us > kept_us) priority_us = std::max(priority_us, spec.submit_us - kept_us);
    }
    if (options_.objective_aware) {
        const int64_t most_us = options_.aging ? options_.aging_us : kNever;
        const bool somebody_waits = spec.latency || spec.group_id >= 0;
        int64_t slack_us = somebody_waits ? 0 : most_us;
        if (spec.start_by_us != kNoTime) {
            slack_us = std::clamp<int64_t>(spec.start_by_us - priority_us, 0, most_us);
        }
        priority_us += slack_us;
    }
    return {priority_us, -spec.depth, spec.call_id};
}

void CallQueue::insert(Call& call) {
    call.key = key_of(call.spec);
    const int64_t tenant = options_.tenant_shares ? call.spec.tenant : 0;
    Lane& lane = tenants_.lane(tenant, call.pool, call.spec.latency);
    call.lane = &lane;
    lane.calls.insert({call.key, &call, 0, call.tokens(), kFresh});
    look_at_front(lane);
    tenants_.enter(lane);
    groups_.insert(call);
    use_.enter_queue(call);
    call.fresh = true;
    fresh_.push_back(&call);
    ++call.pool->num_queued;
    ++size_;
}

void CallQueue::erase(Call& call) {
    groups_.erase(call);
    use_.leave_queue(call);
    Lane& lane = *call.lane;
    lane.calls.erase(call.key);
    if (!lane.calls.empty()) look_at_front(lane);
    tenants_.leave(lane);
    call.lane = nullptr;
    call.fresh = false;
    --call.pool->num_queued;
    --size_;
}

void CallQueue::look_at_front(const Lane& lane) {
    look_again_us_ = std::min(look_again_us_, lane.calls.front().call->spec.submit_us);
}

void CallQueue::begin_pass() {
    ++pass_;
    turn_ = 0;  // calls for which an engine is held go before all turns
    too_large_.clear();
}

Call* CallQueue::next() {
    while (Tenant* tenant = tenants_.first(pass_)) {
        const QueueEntry* best = nullptr;
        for (const auto& lane : tenant->lanes) {
            const QueueEntry* entry = first_of(*lane);
            if (entry != nullptr && (best == nullptr || entry->key < best->key)) best = entry;
        }
        if (best == nullptr) {
            tenants_.set_aside(*tenant, pass_);
            continue;
        }
        best->call->lane->cursor = best->key;
        turn_ = tenant->virtual_time;
        return best->call;
    }
    return nullptr;
}

const QueueEntry* CallQueue::first_of(Lane& lane) {
    if (lane.calls.empty() || !lane.pool->has_room()) return nullptr;
    if (lane.pass != pass_) {
        lane.pass = pass_;
        lane.cursor = {};
    }
    const auto is_untried = [&](const QueueEntry& entry) { return entry.call->tried_pass != pass_; };
    if (options_.full_scan) {
        return lane.calls.next(lane.cursor, std::numeric_limits<int64_t>::max(), is_untried);
    }
    return lane.calls.next(lane.cursor, lane.pool->changed_room(lane.latency), [&](const QueueEntry& entry) {
        if (entry.least != kFresh && too_large_.size() > 0) {
            const int32_t* failed = too_large_.find(entry.chain);
            if (failed != nullptr && entry.tokens >= *failed) return false;
        }
        return is_untried(entry);
    });
}

void CallQueue::mark_failed(const Call& call) {
    const uint64_t chain = call.fresh ? use_.shareable(call).chain : call.lane->calls.at(call.key).chain;
    const auto [tokens, is_new] = too_large_.insert(chain, call.tokens());
    *tokens = std::min(*tokens, call.tokens());
}

void CallQueue::end_passes() {
    for (Call* call : fresh_) {
        if (!call->fresh) continue;
        make_known(*call);
        call->fresh = false;
    }
    fresh_.clear();
}

void CallQueue::make_known(Call& call) {
    const PrefixUse::Shareable shareable = use_.watch(call);
    const int32_t tokens = call.tokens();
    call.lane->calls.update({call.key, &call, shareable.chain, tokens, tokens - shareable.tokens});
}

std::span<Call* const> CallQueue::group_from(const Call& head) const {
    if (!options_.group_placement || head.group == nullptr) return {};
    return TaskGroups::from(head);
}

std::vector<Call*> CallQueue::sharers_of(Call& head, size_t limit) const {
    std::vector<Call*> sharers{&head};
    const PathEntry shared = use_.longest_queued(head);
    if (shared.node == kNoNode || limit < 2) return sharers;
    int32_t others = use_.num_queued(shared.node) - 1;
    int num_seen = 0;
    head.lane->calls.visit_after(head.key, [&](const QueueEntry& entry) {
        Call& call = *entry.call;
        if (has_prefix(call, shared)) {
            --others;
            if (call.tried_pass != pass_ && !is_grouped(call)) sharers.push_back(&call);
        }
        return ++num_seen < kSharerWindow && others > 0 && sharers.size() < limit;
    });
    return sharers;
}

bool CallQueue::is_grouped(const Call& call) const {
    return options_.group_placement && call.group != nullptr && call.group->members.size() > 1;
}

void CallQueue::check_invariants(const std::vector<const Call*>& calls) const {
    tenants_.check_invariants();
    use_.check_invariants(calls);
    size_t queued = 0;
    size_t grouped = 0;
    for (const Call* call : calls) {
        if (call->engine != nullptr) continue;
        ++queued;
        grouped += call->spec.group_id >= 0 ? 1 : 0;
        const QueueEntry& entry = call->lane->calls.at(call->key);
        const int32_t shareable = use_.shareable(*call).tokens;
        const bool is_sound = entry.call == call && (entry.least == kFresh) == call->fresh &&
                              (call->fresh || entry.least <= call->tokens() - shareable);
        if (!is_sound) {
            throw std::logic_error("call " + std::to_string(call->spec.call_id) +
                                   " is not as the queue has it");
        }
    }
    if (queued != size_) {
        throw std::logic_error("the queue counts " + std::to_string(size_) + " calls of " +
                               std::to_string(queued));
    }
    if (groups_.count_members() != grouped) {
        throw std::logic_error("task groups hold " + std::to_string(groups_.count_members()) + " calls of " +
                               std::to_string(grouped));
    }
}

}  // namespace parrot::scheduler
