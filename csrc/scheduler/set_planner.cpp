#include "scheduler/set_planner.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "mutants.h"

namespace parrot::scheduler {

namespace {

// Calls whose longest prefix that another call of the set has, too, is the same one; a call that shares
// nothing is a cluster of its own.
std::vector<std::vector<Call*>> clusters_of(std::span<Call* const> calls) {
    std::unordered_map<NodeId, int32_t> num_holders;
    for (const Call* call : calls) {
        for (const PathEntry& step : call->path) ++num_holders[step.node];
    }
    std::vector<std::vector<Call*>> clusters;
    std::unordered_map<NodeId, size_t> cluster_at;
    for (Call* call : calls) {
        const auto shared = std::find_if(call->path.rbegin(), call->path.rend(),
                                         [&](const PathEntry& step) { return num_holders[step.node] > 1; });
        size_t cluster = clusters.size();
        if (shared != call->path.rend())
            cluster = cluster_at.try_emplace(shared->node, cluster).first->second;
        if (cluster == clusters.size()) clusters.emplace_back();
        clusters[cluster].push_back(call);
    }
    return clusters;
}

std::vector<std::vector<Call*>> singles_of(std::span<Call* const> calls) {
    std::vector<std::vector<Call*>> singles;
    singles.reserve(calls.size());
    for (Call* call : calls) singles.push_back({call});
    return singles;
}

double time_taken(const Scored& scored) {
    return scored.candidate.queue_us + scored.candidate.prefill_us + scored.candidate.decode_us;
}

}  // namespace

Choice SetPlanner::choose(Call& call, int64_t now_us) {
    finder_.evaluate(CallSet(call), now_us, true, {}, found_);
    return choice_of(call, best_admissible(found_));
}

Choice SetPlanner::choose_among(Call& call, std::span<Engine* const> engines, int64_t now_us) {
    const CallSet calls(call);
    found_.clear();
    for (Engine* engine : engines) found_.push_back(finder_.evaluate_one(calls, *engine, now_us));
    return choice_of(call, best_admissible(found_));
}

Choice SetPlanner::choice_of(Call& call, const Scored* best) {
    if (best == nullptr) return {&call, {}, kNoSlot};
    const uint32_t decision = decisions_.record(found_);
    decisions_.retain(decision);
    return {&call, *best, decision};
}

std::vector<Choice> SetPlanner::plan(std::span<Call* const> calls, bool completes_together, int64_t now_us) {
    completes_together_ = completes_together;
    const EnginePool& pool = *calls.front()->pool;
    num_others_ = static_cast<double>(pool.num_queued - calls.size());
    now_us_ = now_us;
    Plan best = all_on_one(calls);
    const bool may_split = options_.splitting && pool.engines().size() > 1 && !mutant("group_never_split");
    if (!best.empty() && !may_split) return best;
    std::vector<Plan> others;
    if (completes_together) {
        std::vector<Unit> clusters = clusters_of(calls);
        if (clusters.size() > 1 && clusters.size() < calls.size()) {
            others.push_back(spread(std::move(clusters)));
        }
    }
    others.push_back(spread(singles_of(calls)));
    double best_us = best.empty() ? 0 : score(best);
    for (Plan& other : others) {
        const double other_us = other.empty() ? 0 : score(other);
        const bool is_better = other.size() > best.size() ||
                               (!other.empty() && other.size() == best.size() && other_us < best_us);
        if (is_better) {
            std::swap(best, other);
            best_us = other_us;
        }
        discard(other);
    }
    return best;
}

void SetPlanner::discard(Plan& plan) {
    for (const Choice& choice : plan) decisions_.drop(choice.decision);
    plan.clear();
}

SetPlanner::Plan SetPlanner::all_on_one(std::span<Call* const> calls) {
    finder_.evaluate(CallSet(calls, completes_together_), now_us_, true, {}, found_);
    const Scored* best = best_admissible(found_);
    if (best == nullptr) return {};
    const uint32_t decision = decisions_.record(found_);
    Plan plan;
    plan.reserve(calls.size());
    for (Call* call : calls) {
        decisions_.retain(decision);
        plan.push_back({call, *best, decision});
    }
    return plan;
}

// Each unit in turn where it is best off, as if the ones before were there; leaves the engines as they were.
// When only the last end counts, the longest units go first, so that the short ones even things out.
SetPlanner::Plan SetPlanner::spread(std::vector<Unit> units) {
    if (completes_together_) sort_by_length(units);
    parts_.clear();
    begun_.clear();
    Plan plan;
    std::vector<Fleet::Admission> admissions;
    finder_.set_alike(true);
    for (const Unit& unit : units) place_unit(unit, plan, admissions);
    finder_.set_alike(false);
    for (size_t i = plan.size(); i-- > 0;) fleet_.take_back(*plan[i].call, admissions[i]);
    return plan;
}

void SetPlanner::sort_by_length(std::vector<Unit>& units) const {
    Engine& any = *units.front().front()->pool->engines().front();
    std::vector<std::pair<double, Unit>> by_length;
    for (Unit& unit : units) {
        const double takes_us = time_taken(finder_.evaluate_one(CallSet(unit, true), any, now_us_));
        by_length.emplace_back(takes_us, std::move(unit));
    }
    std::ranges::stable_sort(by_length, std::greater(), &std::pair<double, Unit>::first);
    for (size_t i = 0; i < units.size(); ++i) units[i] = std::move(by_length[i].second);
}

void SetPlanner::place_unit(const Unit& unit, Plan& plan, std::vector<Fleet::Admission>& admissions) {
    const CallSet calls(unit, completes_together_);
    finder_.evaluate(calls, now_us_, true, begun_, found_);
    const Scored* best = best_engine(calls);
    if (best == nullptr) {
        if (unit.size() == 1) return;
        for (Call* call : unit) place_unit({call}, plan, admissions);
        return;
    }
    const uint32_t decision = decisions_.record(found_);
    for (Call* call : unit) {
        decisions_.retain(decision);
        admissions.push_back(fleet_.admit(*call, *best->engine, time_taken(*best), now_us_));
        plan.push_back({call, *best, decision});
    }
    Part& part = part_of(*best->engine);
    part.num_calls += calls.num_calls;
    part.decode_steps = std::max(part.decode_steps, calls.decode_steps);
}

SetPlanner::Part& SetPlanner::part_of(Engine& engine) {
    const auto known = std::ranges::find(parts_, &engine, &Part::engine);
    if (known != parts_.end()) return *known;
    begun_.push_back(&engine);
    return parts_.emplace_back(Part{&engine, 0, 0});
}

// By score; where only the last end counts, by the end of everything that the plan then has on the engine,
// and what the set's own calls suffer is no harm of its own.
const Scored* SetPlanner::best_engine(const CallSet& unit) const {
    if (!completes_together_) return best_admissible(found_);
    const Scored* best = nullptr;
    std::tuple<double, int32_t, EngineId> best_rank;
    for (const Scored& scored : found_) {
        if (!scored.candidate.admissible) continue;
        const auto placed = std::ranges::find(parts_, scored.engine, &Part::engine);
        const Part part = placed == parts_.end() ? Part{} : *placed;
        const double steps = std::max(part.decode_steps, unit.decode_steps);
        const int32_t batch = scored.engine->batch();
        const double outsiders = batch == 0 ? 0 : 1 - static_cast<double>(part.num_calls) / batch;
        const double end_us =
            scored.candidate.queue_us + scored.candidate.prefill_us + steps * scored.step_us;
        const std::tuple rank(end_us + scored.candidate.harm_us * outsiders, batch, scored.engine->id);
        if (best != nullptr && rank >= best_rank) continue;
        best = &scored;
        best_rank = rank;
    }
    return best;
}

// Mean per call. Two things happen once the other queued calls are placed as well: engines that this plan
// leaves emptier than the average fill up, so that a small batch now is no gain; and what is computed on
// several engines keeps them from the others, each of which waits for its share of it.
double SetPlanner::score(const Plan& plan) {
    std::map<EngineId, std::pair<Engine*, Unit>> units;
    for (const Choice& choice : plan) {
        auto& [engine, unit] = units[choice.scored.engine->id];
        engine = choice.scored.engine;
        unit.push_back(choice.call);
    }
    const EnginePool& pool = *plan.front().call->pool;
    const auto num_calls = static_cast<double>(plan.size());
    const auto num_engines = static_cast<double>(pool.engines().size());
    const double mean_batch =
        (static_cast<double>(pool.num_in_flight()) + num_calls + num_others_) / num_engines;
    double last_us = 0;
    double mean_us = 0;
    double harm_us = 0;
    double compute_us = 0;
    for (const auto& [engine_id, placed] : units) {
        const auto& [engine, unit] = placed;
        const CallSet calls(unit, completes_together_);
        const Scored scored = finder_.evaluate_one(calls, *engine, now_us_);
        const double longer_us =
            (scored.step_us - engine->cost.step_us(engine->batch(), engine->kv_tokens())) / calls.num_calls;
        const double to_come = std::max(0.0, mean_batch - engine->batch() - calls.num_calls);
        const double end_us = time_taken(scored) + longer_us * to_come * calls.decode_steps;
        const double share = calls.num_calls / num_calls;
        last_us = std::max(last_us, end_us);
        mean_us += end_us * share;
        harm_us += scored.candidate.harm_us * share;
        compute_us += scored.compute_us;
    }
    const double wait_us = compute_us * num_others_ / num_engines / num_calls;
    return (completes_together_ ? last_us : mean_us) + harm_us + wait_us;
}

}  // namespace parrot::scheduler
