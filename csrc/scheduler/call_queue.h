// The queued calls in the order in which they are tried: tenants by their share, and the calls of one tenant
// by application, objective and age.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/flat_map.h"
#include "scheduler/prefix_use.h"
#include "scheduler/task_groups.h"
#include "scheduler/tenants.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// A pass of schedule() tries calls one by one with `next`. When it has ended, no queued call fits any engine.
// The next pass therefore only tries what has changed: calls that are *fresh* (new, or put elsewhere in the
// queue), and others where an engine's room has grown, as far as they can be small enough for it.
class CallQueue {
  public:
    explicit CallQueue(const SchedulerOptions& options) : options_(options) {}

    void grow(size_t num_slots) { use_.grow(num_slots); }

    // From submit to the end of a call the queue knows its prefixes.
    void enter(Call& call);
    void leave(Call& call);

    // Throws QueueFull if one more call of the tenant is too many.
    void require_place(int64_t tenant) const;
    void insert(Call& call);
    void erase(Call& call);
    void set_weight(int64_t tenant, double weight) { tenants_.set_weight(tenant, weight); }
    // A call that was in the lane is placed; it has `tokens` to compute.
    void charge(Lane& lane, const QueueKey& key, double tokens) {
        tenants_.charge(lane, key, tokens, turn_, run_);
    }

    size_t size() const { return size_; }

    // A call of schedule(), of one pass or several.
    void begin_run() { ++run_; }
    void begin_pass();
    // The next call to try; null when none is left that could fit.
    Call* next();
    // The call fits no engine: nor do those of its kind that are no smaller.
    void mark_failed(const Call& call);
    uint64_t pass() const { return pass_; }
    void end_passes();

    // A call has lost the engine that was kept for it.
    void lost_hold() { look_again_us_ = 0; }
    // Of the calls that are first in their lane, hold no engine, were passed over in this run and submitted
    // by `submitted_us`, and that `may_hold` takes: the one that waits longest.
    template <class MayHold>
    Call* longest_waiting(int64_t submitted_us, MayHold may_hold);

    // Queued members of the call's task group from the call on, in order; only itself when it has none.
    std::span<Call* const> group_from(const Call& head) const;
    // Whether another queued call has a prefix of this one.
    bool shares_prefix(const Call& call) const { return use_.longest_queued(call).node != kNoNode; }
    // The queued calls of its lane that share the longest shared prefix of `head`, `head` first, looking at
    // most kSharerWindow places behind it; a call with a task group of its own goes with that instead.
    std::vector<Call*> sharers_of(Call& head, size_t limit) const;

    // Throws std::logic_error unless everything here says what `calls` say.
    void check_invariants(const std::vector<const Call*>& calls) const;

  private:
    QueueKey key_of(const CallSpec& spec) const;
    bool is_grouped(const Call& call) const;
    const QueueEntry* first_of(Lane& lane);
    void make_known(Call& call);
    void look_at_front(const Lane& lane);

    SchedulerOptions options_;
    Tenants tenants_;
    TaskGroups groups_;
    PrefixUse use_;
    size_t size_ = 0;
    uint64_t pass_ = 1;
    uint64_t run_ = 0;
    double turn_ = 0;                       // virtual time of the tenant whose turn it is
    std::vector<Call*> fresh_;              // and calls that have left since, or their slots' next users
    std::vector<Call*> company_;            // scratch
    FlatMap<uint64_t, int32_t> too_large_;  // in this pass: by chain, the least tokens that did not fit
    int64_t look_again_us_ = 0;             // no first call of a lane was submitted before
};

template <class MayHold>
Call* CallQueue::longest_waiting(int64_t submitted_us, MayHold may_hold) {
    if (submitted_us < look_again_us_) return nullptr;
    const auto rank = [](const Call& call) { return std::pair(call.spec.submit_us, call.spec.call_id); };
    Call* longest = nullptr;
    int64_t earliest_us = std::numeric_limits<int64_t>::max();
    tenants_.for_each_lane([&](const Lane& lane) {
        if (!tenants_.is_passed_over(lane, run_)) {
            earliest_us = submitted_us;  // it may be in the next run
            return;
        }
        Call& call = *lane.calls.front().call;
        if (call.held != nullptr) return;
        earliest_us = std::min(earliest_us, call.spec.submit_us);
        const bool is_longer = longest == nullptr || rank(call) < rank(*longest);
        if (is_longer && call.spec.submit_us <= submitted_us && may_hold(call)) longest = &call;
    });
    if (earliest_us > submitted_us) look_again_us_ = earliest_us;
    return longest;
}

}  // namespace parrot::scheduler
