#include "scheduler/scheduler.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "scheduler/errors.h"

namespace parrot::scheduler {

namespace {

constexpr int64_t kMaxTimeUs = int64_t{1} << 60;
constexpr int64_t kMaxAgingUs = int64_t{1} << 50;
constexpr int64_t kMaxTokens = int64_t{1} << 40;
constexpr double kMaxCostUs = 1e9;

void require_time(const char* name, int64_t value) { require_within(name, value, 0, kMaxTimeUs); }

void require_cost(const char* name, double value) {
    if (!(value >= 0 && value <= kMaxCostUs)) {
        throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) +
                                    " is not in [0, 1e9]");
    }
}

const SchedulerOptions& checked(const SchedulerOptions& options) {
    require_within("latency_capacity_tokens", options.latency_capacity_tokens, 1, kMaxTokens);
    require_within("aging_us", options.aging_us, 1, kMaxAgingUs);
    return options;
}

}  // namespace

Scheduler::Scheduler(const SchedulerOptions& options, const HashKey& hash_key, bool constant_hash)
    : table_(hash_key, constant_hash),
      queue_(checked(options)),
      fleet_(table_),
      placer_(options, fleet_, queue_, counters_) {}

void Scheduler::add_engine(EngineId engine_id, const CostModel& cost) {
    require_at_least("engine_id", engine_id, 0);
    require_cost("base_us", cost.base_us);
    require_cost("per_sequence_us", cost.per_sequence_us);
    require_cost("per_prefill_token_us", cost.per_prefill_token_us);
    require_cost("per_kv_token_us", cost.per_kv_token_us);
    require_within("capacity_tokens", cost.capacity_tokens, 1, kMaxTokens);
    require_at_least("max_batch_size", cost.max_batch_size, 1);
    fleet_.add(engine_id, cost);
}

std::vector<CallId> Scheduler::remove_engine(EngineId engine_id) {
    Engine& gone = engine(engine_id);
    const std::vector<CallId> lost(gone.in_flight.begin(), gone.in_flight.end());
    for (const CallId call_id : lost) drop(call(call_id));
    fleet_.remove(gone);
    return lost;
}

void Scheduler::submit(const CallSpec& spec, std::span<const int32_t> token_ids,
                       std::span<const int32_t> boundaries) {
    require_at_least("call_id", spec.call_id, 0);
    require_time("app_arrival_us", spec.app_arrival_us);
    require_time("now_us", spec.submit_us);
    require_at_least("depth", spec.depth, 0);
    require_at_least("max_new_tokens", spec.max_new_tokens, 0);
    require_prompt(token_ids, boundaries);
    const auto [entry, is_new] = calls_.try_emplace(spec.call_id);
    if (!is_new)
        throw std::invalid_argument("call_id = " + std::to_string(spec.call_id) + " is there already");
    entry->second = std::make_unique<Call>();
    Call& call = *entry->second;
    call.spec = spec;
    call.prompt_len = static_cast<int32_t>(token_ids.size());
    call.path = table_.acquire(spec.scope, token_ids, boundaries);
    fleet_.grow(table_.num_slots());
    queue_.grow(table_.num_slots());
    queue_.insert(call);
    fresh_.push_back(spec.call_id);
}

void Scheduler::set_objective(CallId call_id, bool latency, int64_t group_id, int32_t depth) {
    require_at_least("depth", depth, 0);
    const auto entry = calls_.find(call_id);
    if (entry == calls_.end()) return;
    Call& call = *entry->second;
    const bool is_queued = call.engine == nullptr;
    if (is_queued) {
        queue_.erase(call);
        call.spec.latency = latency;
    } else {
        fleet_.set_latency(call, latency);
    }
    call.spec.group_id = group_id;
    call.spec.depth = depth;
    if (is_queued) queue_.insert(call);
}

bool Scheduler::cancel(CallId call_id) {
    const auto entry = calls_.find(call_id);
    if (entry == calls_.end()) return false;
    drop(*entry->second);
    return true;
}

std::vector<Placement> Scheduler::schedule(int64_t now_us) {
    require_time("now_us", now_us);
    now_us_ = now_us;
    std::vector<Placement> placements = placer_.run(now_us);
    for (const CallId call_id : fresh_) {
        const auto entry = calls_.find(call_id);
        if (entry != calls_.end() && entry->second->engine == nullptr) ++counters_.deferred;
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
    Engine& engine = *done.engine;
    fleet_.release(done);
    if (context_id != kNoContext) {
        const auto lost = std::ranges::upper_bound(done.path, num_tokens, {}, &PathEntry::length);
        fleet_.release_path({lost, done.path.end()});
        done.path.erase(lost, done.path.end());
        fleet_.add_context(context_id, engine, std::move(done.path));
    } else {
        fleet_.release_path(done.path);
    }
    calls_.erase(call_id);
}

void Scheduler::forget_context(EngineId engine_id, ContextId context_id, int64_t remaining) {
    require_at_least("remaining", remaining, 0);
    fleet_.shorten_context(context_id, engine(engine_id), remaining);
}

std::vector<Candidate> Scheduler::explain(CallId call_id) {
    Call& known = call(call_id);
    return known.engine != nullptr ? *known.decision : placer_.candidates_of(known, now_us_);
}

std::pair<int64_t, int64_t> Scheduler::engine_load(EngineId engine_id) const {
    const Engine& known = engine(engine_id);
    return {known.batch(), known.load_tokens};
}

void Scheduler::check_invariants() const {
    table_.check_invariants();
    queue_.check_invariants();
    fleet_.check_invariants(calls_);
    size_t in_flight = 0;
    for (const Engine* engine : fleet_.engines()) in_flight += engine->in_flight.size();
    if (in_flight != fleet_.num_in_flight()) {
        throw std::logic_error("the fleet counts " + std::to_string(fleet_.num_in_flight()) +
                               " calls in flight of " + std::to_string(in_flight));
    }
    if (in_flight + queue_.size() != calls_.size()) {
        throw std::logic_error(std::to_string(queue_.size()) + " calls queued and " +
                               std::to_string(in_flight) + " in flight are not the " +
                               std::to_string(calls_.size()) + " known");
    }
    if (calls_.empty() && fleet_.num_contexts() == 0 && table_.size() != 0) {
        throw std::logic_error(std::to_string(table_.size()) + " prefixes are left without a holder");
    }
}

Engine& Scheduler::engine(EngineId engine_id) const {
    Engine* known = fleet_.find(engine_id);
    if (known == nullptr) throw UnknownId("engine_id", engine_id);
    return *known;
}

Call& Scheduler::call(CallId call_id) const {
    const auto entry = calls_.find(call_id);
    if (entry == calls_.end()) throw UnknownId("call_id", call_id);
    return *entry->second;
}

void Scheduler::drop(Call& call) {
    if (call.engine == nullptr) {
        queue_.erase(call);
    } else {
        fleet_.release(call);
    }
    fleet_.release_path(call.path);
    calls_.erase(call.spec.call_id);
}

}  // namespace parrot::scheduler
