#include "scheduler/find_engine.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace parrot::scheduler {

namespace {

// A microsecond of a call that somebody waits for counts like this many of calls that nobody waits for.
constexpr double kLatencyWeight = 16;

// An engine with this many times the mean load is crowded, unless it has no more calls than the second.
constexpr double kCrowdedOverMean = 1.25;
constexpr double kNeverCrowded = 8;

// How many candidates are remembered for explain().
constexpr size_t kMaxExplained = 16;

}  // namespace

CallSet::CallSet(std::span<Call* const> calls, bool completes_together)
    : num_calls(static_cast<int32_t>(calls.size())), completes_together(completes_together) {
    for (const Call* call : calls) {
        const int32_t shareable = call->path.empty() ? 0 : call->path.back().length;
        const double steps = std::max(0, call->spec.max_new_tokens - 1);  // prefill yields the first token
        latency |= call->spec.latency;
        prompt_tokens += call->prompt_len - shareable;
        new_tokens += call->spec.max_new_tokens;
        decode_steps = completes_together ? std::max(decode_steps, steps) : decode_steps + steps / num_calls;
        entries.insert(entries.end(), call->path.begin(), call->path.end());
    }
    if (num_calls > 1) {
        const auto key = [](const PathEntry& entry) { return std::tuple(entry.node, entry.previous); };
        std::ranges::sort(entries, {}, key);
        const auto repeated = std::ranges::unique(entries, {}, key);
        entries.erase(repeated.begin(), repeated.end());
    }
    for (const PathEntry& entry : entries) prompt_tokens += entry.length - entry.previous;
}

std::vector<Candidate> EngineFinder::evaluate(const CallSet& calls, std::span<Engine* const> engines,
                                              int64_t now_us) {
    find_overlaps(calls, engines);
    fleet_load_ = 0;
    for (const Engine* engine : fleet_.engines()) fleet_load_ += engine->batch() * engine->pace_us();
    std::vector<Candidate> candidates;
    candidates.reserve(engines.size());
    for (const Engine* engine : engines) {
        candidates.push_back(score(calls, *engine, overlaps_[static_cast<size_t>(engine->slot)], now_us));
    }
    return candidates;
}

Candidate EngineFinder::evaluate(const CallSet& calls, Engine& engine, int64_t now_us) {
    Engine* const only = &engine;
    return evaluate(calls, {&only, 1}, now_us).front();
}

void EngineFinder::find_overlaps(const CallSet& calls, std::span<Engine* const> engines) {
    for (const Engine* engine : engines) {
        const auto slot = static_cast<size_t>(engine->slot);
        if (slot >= overlaps_.size()) overlaps_.resize(slot + 1);
        overlaps_[slot] = {};
    }
    const auto num_slots = static_cast<int32_t>(overlaps_.size());
    for (const PathEntry& entry : calls.entries) {
        const int32_t tokens = entry.length - entry.previous;
        int32_t seen_slot = -1;
        for (const Resident& resident : fleet_.residency().at(entry.node)) {
            if (resident.engine_slot >= num_slots) continue;
            Overlap& overlap = overlaps_[static_cast<size_t>(resident.engine_slot)];
            if (resident.engine_slot != seen_slot) overlap.cached += tokens;
            seen_slot = resident.engine_slot;
            overlap.prefix_len = std::max(overlap.prefix_len, entry.length);
            if (resident.previous != entry.previous) continue;
            if (resident.num_calls > 0) overlap.live += tokens;
            if (resident.num_latency > 0) overlap.live_latency += tokens;
        }
    }
}

Candidate EngineFinder::score(const CallSet& calls, const Engine& engine, const Overlap& overlap,
                              int64_t now_us) const {
    const CostModel& cost = engine.cost;
    const double batch = engine.batch() + calls.num_calls;
    const int64_t prefix_len = options_.prefix_affinity ? overlap.prefix_len : 0;
    const int64_t cached = options_.prefix_affinity ? std::max(overlap.cached, prefix_len) : 0;
    const int64_t least = std::min<int64_t>(calls.num_calls, calls.prompt_tokens);  // each computes a token
    const auto uncached = static_cast<double>(std::max(calls.prompt_tokens - cached, least));
    const double added_kv =
        static_cast<double>(calls.prompt_tokens - overlap.live) + static_cast<double>(calls.new_tokens) / 2;

    Candidate candidate;
    candidate.engine_id = engine.id;
    candidate.admissible = is_admissible(calls, engine, overlap);
    candidate.prefix_len = static_cast<int32_t>(prefix_len);
    candidate.queue_us = std::max(0.0, engine.prefill_until_us - static_cast<double>(now_us));
    candidate.compute_us = cost.per_prefill_token_us * uncached;
    candidate.prefill_us = cost.step_us(batch, engine.kv_tokens()) + candidate.compute_us;
    candidate.step_us = cost.step_us(batch, engine.kv_tokens() + added_kv);
    candidate.decode_us = calls.decode_steps * candidate.step_us;
    const int64_t load_after = engine.load_tokens + calls.prompt_tokens + calls.new_tokens - overlap.live;
    const double lost_us =
        lost_capacity(calls, engine, load_after) * (candidate.prefill_us + candidate.decode_us);
    candidate.harm_us = (harm(calls, engine, candidate.compute_us, added_kv, now_us) + lost_us) /
                        (weight(calls.latency) * calls.num_calls);
    const double crowding = prefix_len == 0 ? 0 : crowding_of(calls, engine);
    if (crowding > 0) {
        const double saved_us =
            cost.per_prefill_token_us * (static_cast<double>(calls.prompt_tokens) - uncached);
        candidate.harm_us += saved_us + crowding * (candidate.prefill_us + candidate.decode_us);
    }
    candidate.score_us = candidate.queue_us + candidate.prefill_us + candidate.decode_us + candidate.harm_us;
    return candidate;
}

// What the residents lose, summed and weighted: the prefill holds all of them up, and every step that they
// still share with the newcomers is longer.
double EngineFinder::harm(const CallSet& calls, const Engine& engine, double compute_us, double added_kv,
                          int64_t now_us) const {
    if (engine.in_flight.empty()) return 0;
    const double batch = engine.batch();
    const double left_us = engine.expected_finish_sum_us / batch - static_cast<double>(now_us);
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
    const int64_t bound = engine.mixing_bound(options_.latency_capacity_tokens);
    if (load_after <= bound) return 0;
    return engine.batch() * (1 - static_cast<double>(bound) / static_cast<double>(load_after));
}

// How far a call that a prefix draws there would take an engine above kCrowdedOverMean times the fleet's mean
// load, as a share of that; 0 below. On a crowded engine a prefix is no advantage, and the more crowded, the
// worse: a hot prefix is replicated before its engine has half as much again as the others, even where
// batching is so cheap that nothing else in the score would see it. Load is calls in flight by the engine's
// pace. A task group is one decision that has weighed several engines already.
double EngineFinder::crowding_of(const CallSet& calls, const Engine& engine) const {
    const double batch = engine.batch() + calls.num_calls;
    if (calls.completes_together || batch <= kNeverCrowded) return 0;
    const double mean_load =
        (fleet_load_ + calls.num_calls * engine.pace_us()) / static_cast<double>(fleet_.engines().size());
    return mean_load > 0 ? std::max(0.0, batch * engine.pace_us() / (kCrowdedOverMean * mean_load) - 1) : 0;
}

bool EngineFinder::is_admissible(const CallSet& calls, const Engine& engine, const Overlap& overlap) const {
    if (engine.held || engine.batch() + calls.num_calls > engine.cost.max_batch_size) return false;
    if (engine.in_flight.empty() && calls.num_calls == 1) return true;
    const int64_t tokens = calls.prompt_tokens + calls.new_tokens;
    const int64_t load_after = engine.load_tokens + tokens - overlap.live;
    if (load_after > engine.cost.capacity_tokens) return false;
    if (!options_.objective_aware) return true;
    const int64_t bound = engine.mixing_bound(options_.latency_capacity_tokens);
    if (calls.latency) {
        const bool is_first = engine.num_latency == 0 && calls.num_calls == 1;
        return is_first || engine.latency_tokens + tokens - overlap.live_latency <= bound;
    }
    return engine.num_latency == 0 || load_after <= bound;
}

double EngineFinder::weight(bool latency) const {
    return latency && options_.objective_aware ? kLatencyWeight : 1;
}

int32_t best_admissible(std::span<const Candidate> candidates, std::span<Engine* const> engines) {
    int32_t best = -1;
    for (size_t i = 0; i < candidates.size(); ++i) {
        if (!candidates[i].admissible) continue;
        const auto rank = [&](size_t at) {
            return std::tuple(candidates[at].score_us, engines[at]->batch());
        };
        if (best < 0 || rank(i) < rank(static_cast<size_t>(best))) best = static_cast<int32_t>(i);
    }
    return best;
}

std::vector<Candidate> best_first(std::vector<Candidate> candidates) {
    const auto rank = [](const Candidate& candidate) {
        return std::tuple(!candidate.admissible, candidate.score_us, candidate.engine_id);
    };
    const size_t kept = std::min(candidates.size(), kMaxExplained);
    std::ranges::partial_sort(candidates, candidates.begin() + static_cast<std::ptrdiff_t>(kept), {}, rank);
    candidates.resize(kept);
    return candidates;
}

}  // namespace parrot::scheduler
