#include "scheduler/fleet.h"

#include <algorithm>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

namespace parrot::scheduler {

Engine& Fleet::add(EngineId id, const CostModel& cost) {
    const auto [entry, is_new] = by_id_.try_emplace(id);
    if (!is_new) throw std::invalid_argument("engine_id = " + std::to_string(id) + " is there already");
    auto engine = std::make_unique<Engine>();
    engine->id = id;
    engine->cost = cost;
    if (free_slots_.empty()) {
        engine->slot = num_slots_++;
    } else {
        engine->slot = free_slots_.back();
        free_slots_.pop_back();
    }
    entry->second = std::move(engine);
    ordered_.insert(std::ranges::lower_bound(ordered_, id, {}, &Engine::id), entry->second.get());
    return *entry->second;
}

void Fleet::remove(Engine& engine) {
    while (!engine.contexts.empty()) forget_context(*engine.contexts.begin());
    free_slots_.push_back(engine.slot);
    std::erase(ordered_, &engine);
    by_id_.erase(engine.id);
}

Engine* Fleet::find(EngineId id) const {
    const auto entry = by_id_.find(id);
    return entry == by_id_.end() ? nullptr : entry->second.get();
}

Fleet::Admission Fleet::admit(Call& call, Engine& engine, const Candidate& estimate, int64_t now_us) {
    const Admission admission{residency_.locate(call.path, engine.slot), engine.prefill_until_us,
                              engine.expected_finish_sum_us};
    const TokenCount added = residency_.add_call(call, engine.slot);
    engine.in_flight.insert(call.spec.call_id);
    engine.num_latency += call.spec.latency ? 1 : 0;
    engine.load_tokens += added.all;
    engine.latency_tokens += added.latency;
    engine.new_tokens += call.spec.max_new_tokens;

    const auto now = static_cast<double>(now_us);
    const int32_t uncached = call.prompt_len - admission.location.prefix_len;
    engine.prefill_until_us =
        std::max(engine.prefill_until_us, now) + engine.cost.per_prefill_token_us * uncached;
    call.expected_finish_us = now + estimate.queue_us + estimate.prefill_us + estimate.decode_us;
    engine.expected_finish_sum_us += call.expected_finish_us;
    call.engine = &engine;
    ++num_in_flight_;
    return admission;
}

void Fleet::take_back(Call& call, const Admission& admission) {
    Engine& engine = *call.engine;
    release(call);
    engine.prefill_until_us = admission.prefill_until_us;
    engine.expected_finish_sum_us = admission.expected_finish_sum_us;
}

void Fleet::release(Call& call) {
    Engine& engine = *call.engine;
    const TokenCount removed = residency_.remove_call(call, engine.slot);
    engine.in_flight.erase(call.spec.call_id);
    engine.num_latency -= call.spec.latency ? 1 : 0;
    engine.load_tokens -= removed.all;
    engine.latency_tokens -= removed.latency;
    engine.new_tokens -= call.spec.max_new_tokens;
    engine.expected_finish_sum_us -= call.expected_finish_us;
    if (engine.in_flight.empty()) {
        engine.expected_finish_sum_us = 0;
        engine.prefill_until_us = 0;
    }
    call.engine = nullptr;
    --num_in_flight_;
}

void Fleet::set_latency(Call& call, bool latency) {
    if (call.spec.latency == latency) return;
    Engine& engine = *call.engine;
    const int64_t changed = residency_.set_latency(call, engine.slot, latency);
    engine.latency_tokens += latency ? changed : -changed;
    engine.num_latency += latency ? 1 : -1;
    call.spec.latency = latency;
}

void Fleet::add_context(ContextId context, Engine& engine, Path path) {
    forget_context(context);
    if (path.empty()) return;
    residency_.add_context(context, path, engine.slot);
    engine.contexts.insert(context);
    contexts_.emplace(context, Context{&engine, std::move(path)});
}

void Fleet::shorten_context(ContextId context, const Engine& engine, int64_t length) {
    const auto entry = contexts_.find(context);
    if (entry == contexts_.end() || entry->second.engine != &engine) return;
    Path& path = entry->second.path;
    const auto lost = std::ranges::upper_bound(path, length, {}, &PathEntry::length);
    if (lost == path.begin()) {
        forget_context(context);
        return;
    }
    const std::span<const PathEntry> gone(lost, path.end());
    residency_.remove_context(context, gone, engine.slot);
    release_path(gone);
    path.erase(lost, path.end());
}

void Fleet::forget_context(ContextId context) {
    const auto entry = contexts_.find(context);
    if (entry == contexts_.end()) return;
    const Context& known = entry->second;
    residency_.remove_context(context, known.path, known.engine->slot);
    release_path(known.path);
    known.engine->contexts.erase(context);
    contexts_.erase(entry);
}

void Fleet::release_path(std::span<const PathEntry> path) {
    for (const PathEntry& step : path) table_.release(step.node);
}

void Fleet::check_invariants(const std::unordered_map<CallId, std::unique_ptr<Call>>& calls) const {
    std::map<EngineId, std::vector<const Call*>> by_engine;
    for (const auto& [id, call] : calls) {
        if (call->engine != nullptr) by_engine[call->engine->id].push_back(call.get());
    }
    size_t num_contexts = 0;
    for (const Engine* engine : ordered_) {
        check_engine(*engine, by_engine[engine->id]);
        num_contexts += engine->contexts.size();
    }
    if (num_contexts != contexts_.size()) {
        throw std::logic_error("engines hold " + std::to_string(num_contexts) + " contexts of " +
                               std::to_string(contexts_.size()));
    }
}

void Fleet::check_engine(const Engine& engine, std::span<const Call* const> calls) const {
    std::set<std::pair<NodeId, int32_t>> held;
    std::set<std::pair<NodeId, int32_t>> held_for_latency;
    Engine expected;
    for (const Call* call : calls) {
        expected.in_flight.insert(call->spec.call_id);
        expected.num_latency += call->spec.latency ? 1 : 0;
        expected.new_tokens += call->spec.max_new_tokens;
        expected.load_tokens += call->own_tokens();
        if (call->spec.latency) expected.latency_tokens += call->own_tokens();
        for (const PathEntry& step : call->path) {
            const std::pair key(step.node, step.previous);
            const int64_t tokens = int64_t{step.length} - step.previous;
            if (held.insert(key).second) expected.load_tokens += tokens;
            if (call->spec.latency && held_for_latency.insert(key).second) expected.latency_tokens += tokens;
        }
    }
    const auto load = [](const Engine& of) {
        return std::tie(of.in_flight, of.num_latency, of.load_tokens, of.latency_tokens, of.new_tokens);
    };
    if (load(engine) != load(expected)) {
        throw std::logic_error("engine " + std::to_string(engine.id) + " counts " +
                               std::to_string(engine.in_flight.size()) + " calls and " +
                               std::to_string(engine.load_tokens) + " tokens; its calls in flight are " +
                               std::to_string(expected.in_flight.size()) + " with " +
                               std::to_string(expected.load_tokens) + " tokens");
    }
}

}  // namespace parrot::scheduler
