#include "scheduler/set_planner.h"

#include <algorithm>
#include <functional>
#include <map>
#include <tuple>
#include <utility>

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

}  // namespace

Choice SetPlanner::choose(Call& call, int64_t now_us) {
    std::vector<Candidate> candidates = finder_.evaluate(CallSet(call), fleet_.engines(), now_us);
    const int32_t best = best_admissible(candidates, fleet_.engines());
    if (best < 0) return {&call, nullptr, {}, nullptr};
    const auto row = static_cast<size_t>(best);
    const Candidate candidate = candidates[row];
    auto decision = std::make_shared<const std::vector<Candidate>>(best_first(std::move(candidates)));
    return {&call, fleet_.engines()[row], candidate, std::move(decision)};
}

std::vector<Choice> SetPlanner::plan(std::span<Call* const> calls, bool completes_together, size_t num_others,
                                     int64_t now_us) {
    completes_together_ = completes_together;
    num_others_ = num_others;
    now_us_ = now_us;
    Plan best = all_on_one(calls);
    if (!best.empty() && fleet_.engines().size() == 1) return best;
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
        if (other.size() < best.size() || other.empty()) continue;
        const double other_us = score(other);
        if (other.size() == best.size() && other_us >= best_us) continue;
        best = std::move(other);
        best_us = other_us;
    }
    return best;
}

SetPlanner::Plan SetPlanner::all_on_one(std::span<Call* const> calls) {
    const CallSet all(calls, completes_together_);
    std::vector<Candidate> candidates = finder_.evaluate(all, fleet_.engines(), now_us_);
    const int32_t best = best_admissible(candidates, fleet_.engines());
    if (best < 0) return {};
    const auto row = static_cast<size_t>(best);
    const Candidate candidate = candidates[row];
    const auto decision = std::make_shared<const std::vector<Candidate>>(best_first(std::move(candidates)));
    Plan plan;
    plan.reserve(calls.size());
    for (Call* call : calls) plan.push_back({call, fleet_.engines()[row], candidate, decision});
    return plan;
}

// Each unit in turn where it is best off, as if the ones before were there; leaves the engines as they were.
// When only the last end counts, the longest units go first, so that the short ones even things out.
SetPlanner::Plan SetPlanner::spread(std::vector<Unit> units) {
    if (completes_together_) {
        std::vector<std::pair<double, Unit>> by_length;
        for (Unit& unit : units) {
            const double end_us = end_of(CallSet(unit, true), *fleet_.engines().front());
            by_length.emplace_back(end_us, std::move(unit));
        }
        std::ranges::stable_sort(by_length, std::greater(), &std::pair<double, Unit>::first);
        for (size_t i = 0; i < units.size(); ++i) units[i] = std::move(by_length[i].second);
    }
    parts_.clear();
    Plan plan;
    std::vector<Fleet::Admission> admissions;
    for (const Unit& unit : units) place_unit(unit, plan, admissions);
    for (size_t i = plan.size(); i-- > 0;) fleet_.take_back(*plan[i].call, admissions[i]);
    return plan;
}

void SetPlanner::place_unit(const Unit& unit, Plan& plan, std::vector<Fleet::Admission>& admissions) {
    const CallSet calls(unit, completes_together_);
    std::vector<Candidate> candidates = finder_.evaluate(calls, fleet_.engines(), now_us_);
    const int32_t best = best_engine(calls, candidates);
    if (best < 0) {
        if (unit.size() == 1) return;
        for (Call* call : unit) place_unit({call}, plan, admissions);
        return;
    }
    const auto row = static_cast<size_t>(best);
    Engine* engine = fleet_.engines()[row];
    const Candidate candidate = candidates[row];
    const auto decision = std::make_shared<const std::vector<Candidate>>(best_first(std::move(candidates)));
    for (Call* call : unit) {
        admissions.push_back(fleet_.admit(*call, *engine, candidate, now_us_));
        plan.push_back({call, engine, candidate, decision});
    }
    Part& part = parts_[engine];
    part.num_calls += calls.num_calls;
    part.decode_steps = std::max(part.decode_steps, calls.decode_steps);
}

// By score; where only the last end counts, by the end of everything that the plan then has on the engine,
// and what the set's own calls suffer is no harm of its own.
int32_t SetPlanner::best_engine(const CallSet& unit, std::span<const Candidate> candidates) const {
    if (!completes_together_) return best_admissible(candidates, fleet_.engines());
    int32_t best = -1;
    std::tuple<double, int32_t> best_rank;
    for (size_t i = 0; i < candidates.size(); ++i) {
        const Candidate& candidate = candidates[i];
        if (!candidate.admissible) continue;
        const Engine* engine = fleet_.engines()[i];
        const auto placed = parts_.find(engine);
        const Part part = placed == parts_.end() ? Part{} : placed->second;
        const double steps = std::max(part.decode_steps, unit.decode_steps);
        const double outsiders =
            engine->batch() == 0 ? 0 : 1 - static_cast<double>(part.num_calls) / engine->batch();
        const double end_us = candidate.queue_us + candidate.prefill_us + steps * candidate.step_us;
        const std::tuple rank(end_us + candidate.harm_us * outsiders, engine->batch());
        if (best >= 0 && rank >= best_rank) continue;
        best = static_cast<int32_t>(i);
        best_rank = rank;
    }
    return best;
}

// Mean per call. Two things happen once the other queued calls are placed as well: engines that this plan
// leaves emptier than the average fill up, so that a small batch now is no gain; and what is computed on
// several engines keeps them from the others, each of which waits for its share of it.
double SetPlanner::score(const Plan& plan) {
    std::map<EngineId, Unit> units;
    for (const Choice& choice : plan) units[choice.engine->id].push_back(choice.call);
    const auto num_calls = static_cast<double>(plan.size());
    const auto num_engines = static_cast<double>(fleet_.engines().size());
    const auto num_others = static_cast<double>(num_others_);
    const double mean_batch =
        (static_cast<double>(fleet_.num_in_flight()) + num_calls + num_others) / num_engines;
    double last_us = 0;
    double mean_us = 0;
    double harm_us = 0;
    double compute_us = 0;
    for (const auto& [engine_id, unit] : units) {
        Engine& engine = *fleet_.find(engine_id);
        const CallSet calls(unit, completes_together_);
        const Candidate candidate = finder_.evaluate(calls, engine, now_us_);
        const double longer_us =
            (candidate.step_us - engine.cost.step_us(engine.batch(), engine.kv_tokens())) / calls.num_calls;
        const double to_come = std::max(0.0, mean_batch - engine.batch() - calls.num_calls);
        const double end_us = candidate.queue_us + candidate.prefill_us + candidate.decode_us +
                              longer_us * to_come * calls.decode_steps;
        const double share = calls.num_calls / num_calls;
        last_us = std::max(last_us, end_us);
        mean_us += end_us * share;
        harm_us += candidate.harm_us * share;
        compute_us += candidate.compute_us;
    }
    const double wait_us = compute_us * num_others / num_engines / num_calls;
    return (completes_together_ ? last_us : mean_us) + harm_us + wait_us;
}

double SetPlanner::end_of(const CallSet& calls, Engine& engine) const {
    const Candidate candidate = finder_.evaluate(calls, engine, now_us_);
    return candidate.score_us - candidate.harm_us;
}

}  // namespace parrot::scheduler
