#include "scheduler/find_engine.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace parrot::scheduler {

namespace {

constexpr size_t kFewEngines = 16;  // up to so many all are looked at

}  // namespace

void EngineFinder::evaluate(const CallSet& calls, int64_t now_us, bool admissible,
                            std::span<Engine* const> besides, std::vector<Scored>& found) {
    found.clear();
    const std::span<Engine* const> all = calls.pool->engines();
    if (all.size() <= kFewEngines || options_.full_scan) {
        for (Engine* engine : all) {
            if (admissible || !engine->is_closed()) found.push_back(evaluate_one(calls, *engine, now_us));
        }
        return;
    }
    for (Engine* engine : shortlist_.find(calls, now_us, admissible, besides)) {
        found.push_back(evaluate_one(calls, *engine, now_us));
    }
    if (!admissible || best_admissible(found) != nullptr) return;
    for (Engine* engine : shortlist_.other_holders(calls)) {
        const Scored scored = evaluate_one(calls, *engine, now_us);
        if (scored.candidate.admissible) found.push_back(scored);
    }
}

Scored EngineFinder::evaluate_one(const CallSet& calls, Engine& engine, int64_t now_us) const {
    return score(calls, engine, overlap_of(calls, engine), now_us);
}

bool EngineFinder::admits(const CallSet& calls, const Engine& engine) const {
    if (!engine.has_room() && engine.held_for != calls.only) return false;
    return is_admissible(calls, engine, overlap_of(calls, engine));
}

std::vector<Candidate> EngineFinder::evaluate_all(const CallSet& calls, int64_t now_us) const {
    std::vector<Candidate> candidates;
    for (Engine* engine : calls.pool->engines()) {
        candidates.push_back(evaluate_one(calls, *engine, now_us).candidate);
    }
    return candidates;
}

EngineFinder::Overlap EngineFinder::overlap_of(const CallSet& calls, const Engine& engine) const {
    Overlap overlap;
    const Residency& residency = fleet_.residency();
    for (const PathEntry& entry : calls.entries) {
        const Resident* resident = residency.first(entry.node, engine.slot);
        if (resident == nullptr) continue;
        const int32_t tokens = entry.length - entry.previous;
        overlap.cached += tokens;
        overlap.prefix_len = std::max(overlap.prefix_len, entry.length);
        for (; resident != nullptr; resident = residency.next(*resident)) {
            if (resident->previous != entry.previous) continue;
            if (resident->num_calls > 0) overlap.live += tokens;
            if (resident->num_latency > 0) overlap.live_latency += tokens;
        }
    }
    return overlap;
}

Scored EngineFinder::score(const CallSet& calls, Engine& engine, const Overlap& overlap,
                           int64_t now_us) const {
    const CostModel& cost = engine.cost;
    const double batch = engine.batch() + calls.num_calls;
    const int64_t prefix_len = options_.prefix_affinity ? overlap.prefix_len : 0;
    const int64_t cached = options_.prefix_affinity ? std::max(overlap.cached, prefix_len) : 0;
    const int64_t least = std::min<int64_t>(calls.num_calls, calls.prompt_tokens);  // each computes a token
    const auto uncached = static_cast<double>(std::max(calls.prompt_tokens - cached, least));
    const double added_kv =
        static_cast<double>(calls.prompt_tokens - overlap.live) + static_cast<double>(calls.new_tokens) / 2;

    Scored scored;
    scored.engine = &engine;
    Candidate& candidate = scored.candidate;
    candidate.engine_id = engine.id;
    candidate.admissible = is_admissible(calls, engine, overlap);
    candidate.prefix_len = static_cast<int32_t>(prefix_len);
    candidate.queue_us = std::max(0.0, engine.prefill_until_us - static_cast<double>(now_us));
    scored.compute_us = cost.per_prefill_token_us * uncached;
    candidate.prefill_us = cost.step_us(batch, engine.kv_tokens()) + scored.compute_us;
    scored.step_us = cost.step_us(batch, engine.kv_tokens() + added_kv);
    candidate.decode_us = calls.decode_steps * scored.step_us;
    const int64_t load_after = engine.load_tokens + calls.prompt_tokens + calls.new_tokens - overlap.live;
    const double lost_us =
        lost_capacity(calls, engine, load_after) * (candidate.prefill_us + candidate.decode_us);
    candidate.harm_us = (harm(calls, engine, scored.compute_us, added_kv, now_us) + lost_us) /
                        (weight(calls.latency) * calls.num_calls);
    const double crowding = prefix_len == 0 || !options_.replication ? 0 : crowding_of(calls, engine);
    if (crowding > 0) {
        const double saved_us =
            cost.per_prefill_token_us * (static_cast<double>(calls.prompt_tokens) - uncached);
        candidate.harm_us += saved_us + crowding * (candidate.prefill_us + candidate.decode_us);
    }
    candidate.score_us = candidate.queue_us + candidate.prefill_us + candidate.decode_us + candidate.harm_us;
    return scored;
}

// What the residents lose, summed and weighted: the prefill holds all of them up, and every step that they
// still share with the newcomers is longer.
double EngineFinder::harm(const CallSet& calls, const Engine& engine, double compute_us, double added_kv,
                          int64_t now_us) const {
    if (engine.calls.empty()) return 0;
    const double batch = engine.batch();
    const double left_us = engine.mean_finish_us() - static_cast<double>(now_us);
    const double step_us = engine.cost.step_us(batch, engine.kv_tokens());
    const double left_steps = step_us > 0 ? std::max(1.0, left_us / step_us) : calls.decode_steps + 1;
    const double longer_us =
        engine.cost.per_sequence_us * calls.num_calls + engine.cost.per_kv_token_us * added_kv;
    const double delay_us = compute_us + longer_us * std::min(calls.decode_steps + 1, left_steps);
    const double num_throughput = batch - engine.num_latency;
    return (engine.num_latency * weight(true) + num_throughput * weight(false)) * delay_us;
}

// How many resident calls' worth of room an engine gives up while it holds a latency-bound call: what is over
// the bound drains away and is not filled again.
double EngineFinder::lost_capacity(const CallSet& calls, const Engine& engine, int64_t load_after) const {
    if (!options_.objective_aware || !calls.latency || engine.num_latency > 0) return 0;
    if (load_after <= engine.bound) return 0;
    return engine.batch() * (1 - static_cast<double>(engine.bound) / static_cast<double>(load_after));
}

// How far a call that a prefix draws there would take an engine above kCrowdedOverMean times the fleet's mean
// load, as a share of that; 0 below. On a crowded engine a prefix is no advantage, and the more crowded, the
// worse: a hot prefix is replicated before its engine has half as much again as the others, even where
// batching is so cheap that nothing else in the score would see it. Load is calls in flight by the engine's
// pace. A task group is one decision that has weighed several engines already.
double EngineFinder::crowding_of(const CallSet& calls, const Engine& engine) const {
    const double batch = engine.batch() + calls.num_calls;
    if (calls.completes_together || batch <= kNeverCrowded) return 0;
    const double pace_us = static_cast<double>(engine.pace_ns) / 1000;
    const EnginePool& pool = *engine.pool;
    const double mean_load =
        (pool.load_us() + calls.num_calls * pace_us) / static_cast<double>(pool.engines().size());
    return mean_load > 0 ? std::max(0.0, batch * pace_us / (kCrowdedOverMean * mean_load) - 1) : 0;
}

bool EngineFinder::is_admissible(const CallSet& calls, const Engine& engine, const Overlap& overlap) const {
    if (engine.paused || (engine.held_for != nullptr && engine.held_for != calls.only)) return false;
    if (engine.batch() + calls.num_calls > engine.cost.max_batch_size) return false;
    if (engine.calls.empty() && calls.num_calls == 1) return true;
    const int64_t tokens = calls.prompt_tokens + calls.new_tokens;
    const int64_t load_after = engine.load_tokens + tokens - overlap.live;
    if (load_after > engine.cost.capacity_tokens || engine.load_tokens >= engine.cost.capacity_tokens) {
        return false;
    }
    if (!options_.objective_aware) return true;
    if (calls.latency) {
        const bool is_first = engine.num_latency == 0 && calls.num_calls == 1;
        return is_first || engine.latency_tokens + tokens - overlap.live_latency <= engine.latency_bound();
    }
    return engine.num_latency == 0 || load_after <= engine.bound;
}

double EngineFinder::weight(bool latency) const {
    return latency && options_.objective_aware ? kLatencyWeight : 1;
}

const Scored* best_admissible(std::span<const Scored> candidates) {
    const auto rank = [](const Scored& scored) {
        return std::tuple(scored.candidate.score_us, scored.engine->batch(), scored.engine->id);
    };
    const Scored* best = nullptr;
    for (const Scored& scored : candidates) {
        if (!scored.candidate.admissible) continue;
        if (best == nullptr || rank(scored) < rank(*best)) best = &scored;
    }
    return best;
}

}  // namespace parrot::scheduler
