#include "scheduler/placer.h"

#include <algorithm>
#include <map>
#include <utility>

namespace parrot::scheduler {

std::vector<Placement> Placer::run(int64_t now_us) {
    ++pass_;
    now_us_ = now_us;
    placements_.clear();
    for (Engine* engine : fleet_.engines()) engine->held = false;
    auto next = queue_.ordered().begin();
    while (next != queue_.ordered().end() && has_room()) {
        const QueueKey key = next->first;
        if (next->second->tried_pass != pass_) place_from(*next->second);
        next = queue_.ordered().upper_bound(key);
    }
    return std::move(placements_);
}

std::vector<Candidate> Placer::candidates_of(Call& call, int64_t now_us) {
    return best_first(finder_.evaluate(CallSet(call), fleet_.engines(), now_us));
}

bool Placer::has_room() const { return std::ranges::any_of(fleet_.engines(), &Engine::has_room); }

size_t Placer::num_free_places() const {
    int64_t places = 0;
    for (const Engine* engine : fleet_.engines()) {
        if (engine->has_room()) places += engine->cost.max_batch_size - engine->batch();
    }
    return static_cast<size_t>(places);
}

void Placer::place_from(Call& head) {
    head.tried_pass = pass_;
    const Companions set = companions_of(head);
    for (Call* call : set.calls) call->tried_pass = pass_;
    if (set.calls.size() > 1) {
        place_set(set);
    } else if (Choice choice = choose(CallSet(head)); choice.engine != nullptr) {
        choice.call = &head;
        commit(choice, choice.candidate.prefix_len > 0 ? Reason::kPrefix : Reason::kAlone);
    }
    const bool has_waited_long = now_us_ - head.spec.submit_us >= options_.aging_us;
    if (head.engine == nullptr && has_waited_long) hold_engine_for(head);
}

Placer::Companions Placer::companions_of(Call& head) const {
    const size_t limit = num_free_places();
    const CallQueue::Ordered* group = options_.group_placement ? queue_.group_of(head) : nullptr;
    if (group != nullptr && group->size() > 1) {
        Companions members{{}, Reason::kGroup};
        auto next = group->find(head.key);  // those before it have been tried
        for (; next != group->end() && members.calls.size() < limit; ++next) {
            members.calls.push_back(next->second);
        }
        return members;
    }
    if (options_.prefix_affinity) return {queue_.sharers_of(head, limit), Reason::kSharers};
    return {{&head}, Reason::kAlone};
}

// All on one engine, unless they do not fit there or would be done sooner on several.
void Placer::place_set(const Companions& set) {
    const bool is_group = set.reason == Reason::kGroup;
    const Choice together = choose(CallSet(set.calls, is_group));
    if (together.engine == nullptr || fleet_.engines().size() > 1) {
        const std::vector<Choice> split = try_split(set);
        const bool is_complete = split.size() == set.calls.size();
        if (together.engine == nullptr ||
            (is_complete && split_score(set, split, together.candidate) < together.candidate.score_us)) {
            std::map<const Engine*, int> members;
            for (const Choice& choice : split) ++members[choice.engine];
            if (members.size() > 1) ++counters_.splits;
            for (const Choice& choice : split) {
                const bool stands_alone = !is_group && members[choice.engine] == 1;
                const Reason own = choice.candidate.prefix_len > 0 ? Reason::kPrefix : Reason::kAlone;
                commit(choice, stands_alone ? own : set.reason);
            }
            return;
        }
    }
    for (Call* call : set.calls) {
        commit({call, together.engine, together.candidate, together.decision}, set.reason);
    }
}

Placer::Choice Placer::choose(const CallSet& calls) {
    std::vector<Candidate> candidates = finder_.evaluate(calls, fleet_.engines(), now_us_);
    const int32_t best = best_admissible(candidates, fleet_.engines());
    if (best < 0) return {};
    const auto row = static_cast<size_t>(best);
    const Candidate candidate = candidates[row];
    auto decision = std::make_shared<const std::vector<Candidate>>(best_first(std::move(candidates)));
    return {nullptr, fleet_.engines()[row], candidate, std::move(decision)};
}

// Each call in turn where it is best off, as if the ones before were there; leaves the engines as they were.
std::vector<Placer::Choice> Placer::try_split(const Companions& set) {
    std::vector<Choice> split;
    std::vector<Fleet::Admission> admissions;
    for (Call* call : set.calls) {
        Choice choice = choose(CallSet(*call));
        if (choice.engine == nullptr) continue;
        choice.call = call;
        admissions.push_back(fleet_.admit(*call, *choice.engine, choice.candidate, now_us_));
        split.push_back(std::move(choice));
    }
    for (size_t i = split.size(); i-- > 0;) fleet_.take_back(*split[i].call, admissions[i]);
    return split;
}

// Comparable with the score of the set on one engine: a task group ends with its last part, sharers count by
// their mean. What is computed more than once keeps engines from the other queued calls, each of which waits
// for its share of it.
double Placer::split_score(const Companions& set, std::span<const Choice> split, const Candidate& together) {
    const bool is_group = set.reason == Reason::kGroup;
    std::map<EngineId, std::vector<Call*>> parts;
    for (const Choice& choice : split) parts[choice.engine->id].push_back(choice.call);
    const auto num_calls = static_cast<double>(split.size());
    double last_us = 0;
    double mean_us = 0;
    double harm_us = 0;
    double repeated_us = -together.prefill_us;
    for (const auto& [engine_id, calls] : parts) {
        const CallSet part(calls, is_group);
        const Candidate candidate = finder_.evaluate(part, *fleet_.find(engine_id), now_us_);
        const double share = static_cast<double>(calls.size()) / num_calls;
        const double finish_us = candidate.score_us - candidate.harm_us;
        last_us = std::max(last_us, finish_us);
        mean_us += finish_us * share;
        harm_us += candidate.harm_us * share;
        repeated_us += candidate.prefill_us;
    }
    const double others_per_engine =
        (static_cast<double>(queue_.size()) - num_calls) / static_cast<double>(fleet_.engines().size());
    harm_us += std::max(0.0, repeated_us) * others_per_engine / num_calls;
    return (is_group ? last_us : mean_us) + harm_us;
}

void Placer::commit(const Choice& choice, Reason reason) {
    Call& call = *choice.call;
    queue_.erase(call);
    const Residency::Location location =
        fleet_.admit(call, *choice.engine, choice.candidate, now_us_).location;
    call.decision = choice.decision;
    count(reason);
    Placement placement{call.spec.call_id,        choice.engine->id, kNoContext, 0, reason,
                        choice.candidate.score_us};
    if (options_.prefix_affinity) {
        placement.parent_context_id = location.context;
        placement.prefix_len = location.prefix_len;
    }
    placements_.push_back(placement);
}

void Placer::count(Reason reason) {
    ++counters_.placed;
    switch (reason) {
        case Reason::kGroup:
            ++counters_.placed_group;
            break;
        case Reason::kSharers:
            ++counters_.placed_sharers;
            break;
        case Reason::kPrefix:
            ++counters_.placed_prefix;
            break;
        case Reason::kAlone:
            ++counters_.placed_alone;
            break;
    }
}

// The engine where the call would be best off takes nothing more in this pass, so that it drains until the
// call fits; else a stream of smaller calls could keep it out for ever.
void Placer::hold_engine_for(Call& call) {
    const std::vector<Candidate> candidates = finder_.evaluate(CallSet(call), fleet_.engines(), now_us_);
    Engine* best = nullptr;
    double best_us = 0;
    for (size_t i = 0; i < candidates.size(); ++i) {
        Engine* engine = fleet_.engines()[i];
        if (engine->held || (best != nullptr && candidates[i].score_us >= best_us)) continue;
        best = engine;
        best_us = candidates[i].score_us;
    }
    if (best != nullptr) best->held = true;
}

}  // namespace parrot::scheduler
