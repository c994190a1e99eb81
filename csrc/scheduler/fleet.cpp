#include "scheduler/fleet.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "mutants.h"

namespace parrot::scheduler {

EnginePool& Fleet::pool(int64_t model) { return pools_.try_emplace(model, options_).first->second; }

Engine& Fleet::add(EngineId id, int64_t model, const CostModel& cost) {
    const auto [entry, is_new] = by_id_.insert(id, nullptr);
    if (!is_new) throw std::invalid_argument("engine_id = " + std::to_string(id) + " is there already");
    if (free_slots_.empty()) {
        free_slots_.push_back(static_cast<int32_t>(by_slot_.size()));
        by_slot_.emplace_back();
    }
    const int32_t slot = free_slots_.back();
    free_slots_.pop_back();
    by_slot_[static_cast<size_t>(slot)] = std::make_unique<Engine>();
    Engine& engine = *by_slot_[static_cast<size_t>(slot)];
    engine.id = id;
    engine.slot = slot;
    engine.cost = engine.measured = cost;
    *entry = &engine;
    pool(model).add(engine);
    return engine;
}

void Fleet::remove(Engine& engine) {
    while (!engine.contexts.empty()) forget_context(engine.contexts.back());
    engine.pool->remove(engine);
    by_id_.erase(engine.id);
    free_slots_.push_back(engine.slot);
    by_slot_[static_cast<size_t>(engine.slot)].reset();
}

Engine* Fleet::find(EngineId id) const {
    Engine* const* engine = by_id_.find(id);
    return engine == nullptr ? nullptr : *engine;
}

Fleet::Admission Fleet::admit(Call& call, Engine& engine, double takes_us, int64_t now_us) {
    const Admission admission{residency_.locate(call.path, engine.slot), engine.prefill_until_us};
    const TokenCount added = residency_.add_call(call, engine.slot);
    call.position = static_cast<uint32_t>(engine.calls.size());
    engine.calls.push_back(&call);
    engine.num_latency += call.spec.latency ? 1 : 0;
    engine.num_targeted += call.spec.is_targeted() ? 1 : 0;
    engine.load_tokens += added.all;
    engine.latency_tokens += added.latency;
    engine.new_tokens += call.spec.max_new_tokens;

    const auto now = static_cast<double>(now_us);
    const int32_t uncached = call.prompt_len - admission.location.prefix_len;
    engine.prefill_until_us =
        std::max(engine.prefill_until_us, now) + engine.cost.per_prefill_token_us * uncached;
    constexpr double kMaxTakesUs = 1e15;
    call.expected_finish_us = now_us + std::llround(std::min(takes_us, kMaxTakesUs));
    engine.expected_finish_sum_us += call.expected_finish_us;
    call.engine = &engine;
    engine.pool->refresh(engine);
    return admission;
}

void Fleet::take_back(Call& call, const Admission& admission) {
    Engine& engine = *call.engine;
    remove_call(call);
    engine.prefill_until_us = admission.prefill_until_us;
    engine.pool->refresh(engine);
}

void Fleet::release(Call& call) {
    Engine& engine = *call.engine;
    remove_call(call);
    if (engine.calls.empty()) engine.prefill_until_us = 0;
    engine.pool->refresh(engine);
    engine.pool->mark_changed(engine);
}

void Fleet::remove_call(Call& call) {
    Engine& engine = *call.engine;
    const TokenCount removed = residency_.remove_call(call, engine.slot);
    engine.calls[call.position] = engine.calls.back();
    engine.calls[call.position]->position = call.position;
    engine.calls.pop_back();
    engine.num_latency -= call.spec.latency ? 1 : 0;
    engine.num_targeted -= call.spec.is_targeted() ? 1 : 0;
    engine.load_tokens -= removed.all;
    engine.latency_tokens -= removed.latency;
    engine.new_tokens -= call.spec.max_new_tokens;
    engine.expected_finish_sum_us -= call.expected_finish_us;
    call.engine = nullptr;
}

void Fleet::set_latency(Call& call, bool latency, double per_token_us) {
    if (call.spec.latency == latency && call.spec.per_token_us == per_token_us) return;
    Engine& engine = *call.engine;
    engine.num_targeted -= call.spec.is_targeted() ? 1 : 0;
    if (call.spec.latency != latency) {
        const int64_t changed = residency_.set_latency(call, engine.slot, latency);
        engine.latency_tokens += latency ? changed : -changed;
        engine.num_latency += latency ? 1 : -1;
    }
    call.spec.latency = latency;
    call.spec.per_token_us = per_token_us;
    engine.num_targeted += call.spec.is_targeted() ? 1 : 0;
    engine.pool->refresh(engine);
    engine.pool->mark_changed(engine);
}

void Fleet::hold(Call& call, Engine& engine) {
    engine.held_for = &call;
    ++engine.pool->num_holds;
    engine.pool->refresh(engine);
}

void Fleet::end_hold(Engine& engine) {
    engine.held_for = nullptr;
    --engine.pool->num_holds;
    engine.pool->refresh(engine);
    engine.pool->mark_changed(engine);
}

// The context comes before the call goes, so that what the engine holds is not forgotten in between.
void Fleet::leave_context(Call& call, ContextId context, int64_t length) {
    if (const uint32_t* known = context_slots_.find(context)) forget_context(*known);
    Engine& engine = *call.engine;
    const auto lost = std::ranges::upper_bound(call.path, length, {}, &PathEntry::length);
    const std::span<const PathEntry> kept(call.path.begin(), lost);
    residency_.add_context(context, kept, engine.slot);
    release(call);
    release_path({lost, call.path.end()});
    call.path.erase(lost, call.path.end());
    keep_context(engine, context, std::move(call.path));
}

void Fleet::add_context(Engine& engine, ContextId context, Path path) {
    residency_.add_context(context, path, engine.slot);
    keep_context(engine, context, std::move(path));
}

// The residency has it already.
void Fleet::keep_context(Engine& engine, ContextId context, Path path) {
    if (path.empty()) return;
    const uint32_t slot = contexts_.take();
    context_slots_.insert(context, slot);
    contexts_[slot] = {context, &engine, std::move(path), static_cast<uint32_t>(engine.contexts.size())};
    engine.contexts.push_back(slot);
}

void Fleet::shorten_context(ContextId context, const Engine& engine, int64_t length) {
    const uint32_t* slot = context_slots_.find(context);
    if (slot == nullptr || contexts_[*slot].engine != &engine || mutant("stale_entry_kept")) return;
    Path& path = contexts_[*slot].path;
    const auto lost = std::ranges::upper_bound(path, length, {}, &PathEntry::length);
    if (lost == path.begin()) {
        forget_context(*slot);
        return;
    }
    const std::span<const PathEntry> gone(lost, path.end());
    residency_.remove_context(context, gone, engine.slot);
    release_path(gone);
    path.erase(lost, path.end());
}

void Fleet::forget_context(uint32_t slot) {
    Context& context = contexts_[slot];
    residency_.remove_context(context.id, context.path, context.engine->slot);
    release_path(context.path);
    std::vector<uint32_t>& siblings = context.engine->contexts;
    siblings[context.position] = siblings.back();
    contexts_[siblings.back()].position = context.position;
    siblings.pop_back();
    context_slots_.erase(context.id);
    contexts_.give(slot);
}

void Fleet::release_path(std::span<const PathEntry> path) {
    for (const PathEntry& step : path) table_.release(step.node);
}

namespace {

void check_engine(const Engine& engine, std::span<const Call* const> calls) {
    std::set<std::pair<NodeId, int32_t>> held;
    std::set<std::pair<NodeId, int32_t>> held_for_latency;
    Engine expected;
    for (const Call* call : calls) {
        const bool is_there = call->position < engine.calls.size() && engine.calls[call->position] == call;
        if (!is_there) throw std::logic_error("a call is not where its engine has it");
        expected.num_latency += call->spec.latency ? 1 : 0;
        expected.num_targeted += call->spec.is_targeted() ? 1 : 0;
        expected.new_tokens += call->spec.max_new_tokens;
        expected.load_tokens += call->own_tokens();
        expected.expected_finish_sum_us += call->expected_finish_us;
        if (call->spec.latency) expected.latency_tokens += call->own_tokens();
        for (const PathEntry& step : call->path) {
            const std::pair key(step.node, step.previous);
            const int64_t tokens = int64_t{step.length} - step.previous;
            if (held.insert(key).second) expected.load_tokens += tokens;
            if (call->spec.latency && held_for_latency.insert(key).second) expected.latency_tokens += tokens;
        }
    }
    const auto load = [](const Engine& of) {
        return std::tie(of.num_latency, of.num_targeted, of.load_tokens, of.latency_tokens, of.new_tokens,
                        of.expected_finish_sum_us);
    };
    if (engine.calls.size() != calls.size() || load(engine) != load(expected)) {
        throw std::logic_error(
            "engine " + std::to_string(engine.id) + " counts " + std::to_string(engine.calls.size()) +
            " calls and " + std::to_string(engine.load_tokens) + " tokens; its calls in flight are " +
            std::to_string(calls.size()) + " with " + std::to_string(expected.load_tokens) + " tokens");
    }
}

}  // namespace

void Fleet::check_invariants(const std::vector<const Call*>& calls) const {
    std::unordered_map<const Engine*, std::vector<const Call*>> by_engine;
    for (const Call* call : calls) {
        if (call->engine != nullptr) by_engine[call->engine].push_back(call);
        if (call->held != nullptr && call->held->held_for != call) {
            throw std::logic_error("an engine is held for another call than its holder");
        }
    }
    size_t num_contexts = 0;
    for (const auto& [model, pool] : pools_) {
        pool.check_invariants();
        for (const Engine* engine : pool.engines()) {
            check_engine(*engine, by_engine[engine]);
            num_contexts += engine->contexts.size();
        }
    }
    if (num_contexts != contexts_.size() || num_contexts != context_slots_.size()) {
        throw std::logic_error("engines hold " + std::to_string(num_contexts) + " contexts of " +
                               std::to_string(contexts_.size()));
    }
}

}  // namespace parrot::scheduler
