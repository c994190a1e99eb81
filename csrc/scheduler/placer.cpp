#include "scheduler/placer.h"

#include <algorithm>
#include <unordered_map>
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
    } else if (const Choice choice = planner_.choose(head, now_us_); choice.engine != nullptr) {
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

void Placer::place_set(const Companions& set) {
    const bool is_group = set.reason == Reason::kGroup;
    const size_t num_others = queue_.size() - set.calls.size();
    const std::vector<Choice> plan = planner_.plan(set.calls, is_group, num_others, now_us_);
    std::unordered_map<const Engine*, int32_t> num_members;
    for (const Choice& choice : plan) ++num_members[choice.engine];
    if (num_members.size() > 1) ++counters_.splits;
    for (const Choice& choice : plan) {
        const bool stands_alone = !is_group && num_members[choice.engine] == 1;
        const Reason own = choice.candidate.prefix_len > 0 ? Reason::kPrefix : Reason::kAlone;
        commit(choice, stands_alone ? own : set.reason);
    }
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
