#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "mutants.h"
#include "scheduler/errors.h"

namespace parrot::scheduler {

namespace {

constexpr int64_t kMaxTimeUs = int64_t{1} << 60;
constexpr int64_t kMaxAgingUs = int64_t{1} << 50;
constexpr int64_t kMaxTokens = int64_t{1} << 40;
constexpr int64_t kMaxCallTokens = (int64_t{1} << 30) - 1;  // of a prompt, and of an answer
constexpr int64_t kMaxQueued = int64_t{1} << 31;
constexpr double kMaxCostUs = 1e9;
constexpr double kMaxTokenTargetUs = 86.4e9;  // a day, which is the most that a client may ask for
constexpr double kMaxSlowdown = 1e4;
constexpr double kMinWeight = 1e-6;
constexpr double kMaxWeight = 1e6;

void require_time(const char* name, int64_t value) { require_within(name, value, 0, kMaxTimeUs); }

void require_number(const char* name, double value, double low, double high) {
    if (!(value >= low && value <= high)) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " is not in [" +
                                    std::to_string(low) + ", " + std::to_string(high) + "]");
    }
}

void require_costs(const CostModel& cost) {
    require_number("base_us", cost.base_us, 0, kMaxCostUs);
    require_number("per_sequence_us", cost.per_sequence_us, 0, kMaxCostUs);
    require_number("per_prefill_token_us", cost.per_prefill_token_us, 0, kMaxCostUs);
    require_number("per_kv_token_us", cost.per_kv_token_us, 0, kMaxCostUs);
}

SchedulerOptions checked(SchedulerOptions options) {
    if (mutant("aging_off")) options.aging = false;
    require_within("latency_capacity_tokens", options.latency_capacity_tokens, 1, kMaxTokens);
    require_within("aging_us", options.aging_us, 1, kMaxAgingUs);
    require_within("max_queued", options.max_queued, 1, kMaxQueued);
    require_within("max_queued_per_tenant", options.max_queued_per_tenant, 1, kMaxQueued);
    return options;
}

void require_targets(int64_t start_by_us, double per_token_us) {
    if (start_by_us != kNoTime) require_within("start_by_us", start_by_us, -kMaxTimeUs, kMaxTimeUs);
    require_number("per_token_us", per_token_us, 0, kMaxTokenTargetUs);
}

void require_call(const CallSpec& spec, std::span<const int32_t> token_ids,
                  std::span<const int32_t> boundaries) {
    require_at_least("call_id", spec.call_id, 0);
    require_time("app_arrival_us", spec.app_arrival_us);
    require_time("now_us", spec.submit_us);
    if (spec.app_ran_us != kNoTime) require_time("app_ran_us", spec.app_ran_us);
    require_at_least("depth", spec.depth, 0);
    require_targets(spec.start_by_us, spec.per_token_us);
    require_within("max_new_tokens", spec.max_new_tokens, 0, kMaxCallTokens);
    require_within("len(token_ids)", static_cast<int64_t>(token_ids.size()), 0, kMaxCallTokens);
    require_prompt(token_ids, boundaries);
    require_public_len(spec.scope.public_len, token_ids, boundaries);
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const HashKey& hash_key, bool constant_hash)
    : options_(checked(options)),
      table_(hash_key, constant_hash),
      queue_(options_),
      fleet_(options_, table_),
      placer_(options_, fleet_, queue_, decisions_, counters_) {}

void Scheduler::add_engine(EngineId engine_id, int64_t model, const CostModel& cost) {
    require_at_least("engine_id", engine_id, 0);
    require_costs(cost);
    require_within("capacity_tokens", cost.capacity_tokens, 1, kMaxTokens);
    require_at_least("max_batch_size", cost.max_batch_size, 1);
    fleet_.add(engine_id, model, cost);
}

std::vector<CallId> Scheduler::remove_engine(EngineId engine_id) {
    Engine& gone = engine(engine_id);
    if (gone.held_for != nullptr) placer_.end_hold(*gone.held_for);
    std::vector<CallId> lost;
    for (const Call* call : gone.calls) lost.push_back(call->spec.call_id);
    std::ranges::sort(lost);
    for (const CallId call_id : lost) drop(call(call_id));
    fleet_.remove(gone);
    return lost;
}

void Scheduler::set_paused(EngineId engine_id, bool paused) {
    Engine& changed = engine(engine_id);
    if (changed.paused == paused) return;
    if (changed.held_for != nullptr) placer_.end_hold(*changed.held_for);
    changed.paused = paused;
    changed.pool->refresh(changed);
    if (!paused) changed.pool->mark_changed(changed);
}

void Scheduler::set_slowdown(EngineId engine_id, double slowdown) {
    require_number("slowdown", slowdown, 1 / kMaxSlowdown, kMaxSlowdown);
    Engine& changed = engine(engine_id);
    changed.pool->set_slowdown(changed, slowdown);
}

void Scheduler::set_cost(EngineId engine_id, const CostModel& cost) {
    require_costs(cost);
    Engine& changed = engine(engine_id);
    changed.pool->set_cost(changed, cost);
}

void Scheduler::submit(const CallSpec& spec, std::span<const int32_t> token_ids,
                       std::span<const int32_t> boundaries) {
    require_call(spec, token_ids, boundaries);
    if (slots_.find(spec.call_id) != nullptr) {
        throw std::invalid_argument("call_id = " + std::to_string(spec.call_id) + " is there already");
    }
    queue_.require_place(spec.tenant);
    const uint32_t slot = calls_.take();
    slots_.insert(spec.call_id, slot);
    Call& call = calls_[slot];
    call.spec = spec;
    call.slot = slot;
    call.prompt_len = static_cast<int32_t>(token_ids.size());
    call.pool = &fleet_.pool(spec.scope.model);
    call.path = acquire_path(spec.scope, token_ids, boundaries);
    queue_.enter(call);
    fresh_.push_back(spec.call_id);
}

void Scheduler::set_objective(CallId call_id, const Objective& objective) {
    require_at_least("depth", objective.depth, 0);
    require_targets(objective.start_by_us, objective.per_token_us);
    Call* known = find(call_id);
    if (known == nullptr) return;
    Call& call = *known;
    const bool is_queued = call.engine == nullptr;
    if (is_queued) {
        queue_.erase(call);
        call.spec.latency = objective.latency;
        call.spec.per_token_us = objective.per_token_us;
    } else {
        fleet_.set_latency(call, objective.latency, objective.per_token_us);
    }
    call.spec.group_id = objective.group_id;
    call.spec.depth = objective.depth;
    call.spec.start_by_us = objective.start_by_us;
    if (is_queued) queue_.insert(call);
}

bool Scheduler::cancel(CallId call_id) {
    Call* known = find(call_id);
    if (known == nullptr) return false;
    drop(*known);
    return true;
}

void Scheduler::set_tenant_weight(int64_t tenant, double weight) {
    require_number("weight", weight, kMinWeight, kMaxWeight);
    queue_.set_weight(tenant, weight);
}

std::vector<Placement> Scheduler::schedule(int64_t now_us) {
    require_time("now_us", now_us);
    now_us_ = now_us;
    std::vector<Placement> placements = placer_.run(now_us);
    for (const CallId call_id : fresh_) {
        const Call* call = find(call_id);
        if (call != nullptr && call->engine == nullptr) ++counters_.deferred;
    }
    fresh_.clear();
    return placements;
}

void Scheduler::finish(CallId call_id, int64_t now_us, ContextId context_id, int64_t num_tokens) {
    require_time("now_us", now_us);
    require_at_least("context_id", context_id, 0);
    require_at_least("num_tokens", num_tokens, 0);
    Call& done = call(call_id);
    if (done.engine == nullptr) {
        throw std::invalid_argument("call_id = " + std::to_string(call_id) + " is queued, not in flight");
    }
    queue_.leave(done);
    if (context_id != kNoContext) {
        fleet_.leave_context(done, context_id, num_tokens);
    } else {
        fleet_.release(done);
        fleet_.release_path(done.path);
    }
    end(done);
}

void Scheduler::add_context(EngineId engine_id, ContextId context_id, const PrefixScope& scope,
                            std::span<const int32_t> token_ids, std::span<const int32_t> boundaries) {
    require_at_least("context_id", context_id, 1);
    require_prompt(token_ids, boundaries);
    require_public_len(scope.public_len, token_ids, boundaries);
    Engine& holder = engine(engine_id);
    if (fleet_.has_context(context_id)) {
        throw std::invalid_argument("context_id = " + std::to_string(context_id) + " is there already");
    }
    fleet_.add_context(holder, context_id, acquire_path(scope, token_ids, boundaries));
}

void Scheduler::forget_context(EngineId engine_id, ContextId context_id, int64_t remaining) {
    require_at_least("remaining", remaining, 0);
    fleet_.shorten_context(context_id, engine(engine_id), remaining);
}

std::vector<Candidate> Scheduler::explain(CallId call_id) {
    const Call& known = call(call_id);
    if (known.engine != nullptr) return decisions_.candidates(known.decision);
    return placer_.candidates_of(known, now_us_);
}

std::vector<Candidate> Scheduler::candidates(const CallSpec& spec, std::span<const int32_t> token_ids,
                                             std::span<const int32_t> boundaries, int64_t now_us) {
    require_call(spec, token_ids, boundaries);
    require_time("now_us", now_us);
    Call call;
    call.spec = spec;
    call.prompt_len = static_cast<int32_t>(token_ids.size());
    call.pool = &fleet_.pool(spec.scope.model);
    call.path = acquire_path(spec.scope, token_ids, boundaries);
    std::vector<Candidate> found = placer_.shortlist_of(call, now_us);
    fleet_.release_path(call.path);
    return found;
}

std::pair<int64_t, int64_t> Scheduler::engine_load(EngineId engine_id) const {
    const Engine& known = engine(engine_id);
    return {known.batch(), known.load_tokens};
}

void Scheduler::check_invariants() const {
    std::vector<const Call*> calls;
    size_t in_flight = 0;
    slots_.for_each([&](CallId call_id, uint32_t slot) {
        const Call& call = calls_[slot];
        if (call.spec.call_id != call_id || call.slot != slot) throw std::logic_error("a call's slot is off");
        calls.push_back(&call);
        in_flight += call.engine != nullptr ? 1 : 0;
    });
    table_.check_invariants();
    queue_.check_invariants(calls);
    fleet_.check_invariants(calls);
    if (calls.size() != calls_.size() || in_flight + queue_.size() != calls.size()) {
        throw std::logic_error(std::to_string(queue_.size()) + " calls queued and " +
                               std::to_string(in_flight) + " in flight are not the " +
                               std::to_string(calls_.size()) + " known");
    }
    if (decisions_.size() > in_flight) throw std::logic_error("a decision is kept for no call");
    if (calls.empty() && fleet_.num_contexts() == 0 && table_.size() != 0) {
        throw std::logic_error(std::to_string(table_.size()) + " prefixes are left without a holder");
    }
}

Engine& Scheduler::engine(EngineId engine_id) const {
    Engine* known = fleet_.find(engine_id);
    if (known == nullptr) throw UnknownId("engine_id", engine_id);
    return *known;
}

Call* Scheduler::find(CallId call_id) {
    const uint32_t* slot = slots_.find(call_id);
    return slot == nullptr ? nullptr : &calls_[*slot];
}

Call& Scheduler::call(CallId call_id) {
    Call* known = find(call_id);
    if (known == nullptr) throw UnknownId("call_id", call_id);
    return *known;
}

Path Scheduler::acquire_path(const PrefixScope& scope, std::span<const int32_t> token_ids,
                             std::span<const int32_t> boundaries) {
    if (boundaries.empty()) return {};
    Path path = table_.acquire(scope, token_ids, boundaries);
    fleet_.grow(table_.num_slots());
    queue_.grow(table_.num_slots());
    return path;
}

// The call's record is used again; its place in the queue or on an engine, and its path, are given up
// already.
void Scheduler::end(Call& call) {
    if (call.decision != kNoSlot) decisions_.drop(call.decision);
    slots_.erase(call.spec.call_id);
    calls_.give(call.slot);
}

void Scheduler::drop(Call& call) {
    placer_.end_hold(call);
    queue_.leave(call);
    if (call.engine != nullptr) fleet_.release(call);
    fleet_.release_path(call.path);
    end(call);
}

}  // namespace parrot::scheduler
