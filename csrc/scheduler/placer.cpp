#include "scheduler/placer.h"

#include <algorithm>
#include <utility>

namespace parrot::scheduler {

namespace {

constexpr size_t kEnginesPerHold = 16;  // one of so many may be held, and one in any case

// So many engines with new room are looked at one by one.
constexpr size_t kFewChanged = 16;

}  // namespace

std::vector<Placement> Placer::run(int64_t now_us) {
    now_us_ = now_us;
    placements_.clear();
    queue_.begin_run();
    do {
        run_pass();
    } while (free_left_engines());
    queue_.end_passes();
    fleet_.for_each_pool([](EnginePool& pool) { pool.clear_changed(); });
    if (options_.aging) hold_an_engine();
    return std::move(placements_);
}

void Placer::run_pass() {
    queue_.begin_pass();
    place_holders();
    while (fleet_.has_room()) {
        Call* head = queue_.next();
        if (head == nullptr) return;
        place_from(*head);
    }
}

void Placer::place_holders() {
    for (size_t i = 0; i < holders_.size();) {
        Call& call = *holders_[i];
        Engine* const held = call.held;
        if (finder_.admits(CallSet(call), *held)) {
            end_hold(call);
            commit_alone(planner_.choose_among(call, {&held, 1}, now_us_));
        } else {
            ++i;
        }
    }
}

// A call has found a place elsewhere than on the engine that was kept for it. Other calls see that engine in
// a pass of their own, so that every call has one turn in each.
bool Placer::free_left_engines() {
    if (left_.empty()) return false;
    for (Engine* engine : left_) fleet_.end_hold(*engine);
    left_.clear();
    return true;
}

void Placer::place_from(Call& head) {
    head.tried_pass = queue_.pass();
    const bool may_open = may_open_set(head);
    if (may_open && head.fresh && finder_.admits_plainly(CallSet(head))) {
        place_companions(head, nullptr);
        return;
    }
    const Choice choice = choose(head);
    if (choice.scored.engine == nullptr) {
        queue_.mark_failed(head);
    } else if (may_open) {
        place_companions(head, &choice);
    } else {
        commit_alone(choice);
    }
}

void Placer::commit_alone(const Choice& choice) {
    commit(choice, choice.scored.candidate.prefix_len > 0 ? Reason::kPrefix : Reason::kAlone);
}

// Some engine can take the call, the chosen one if it has been chosen; others may go with it.
void Placer::place_companions(Call& head, const Choice* choice) {
    const Companions set = companions_of(head);
    for (Call* call : set.calls) call->tried_pass = queue_.pass();
    if (set.calls.size() > 1) {
        if (choice != nullptr) planner_.forget(*choice);
        place_set(set);
    } else {
        commit_alone(choice != nullptr ? *choice : choose(head));
    }
}

bool Placer::may_open_set(const Call& head) const {
    const bool has_group =
        options_.group_placement && head.group != nullptr && head.group->members.size() > 1;
    return has_group || (options_.prefix_affinity && queue_.shares_prefix(head));
}

// A call that has been refused by every engine can only fit where room has grown since.
Choice Placer::choose(Call& head) {
    const std::span<Engine* const> changed = head.pool->changed();
    const bool sees_all = head.fresh || options_.full_scan || changed.size() > kFewChanged;
    if (sees_all) return planner_.choose(head, now_us_);
    return planner_.choose_among(head, changed, now_us_);
}

Placer::Companions Placer::companions_of(Call& head) const {
    const auto limit = static_cast<size_t>(std::max<int64_t>(1, head.pool->num_places()));
    const std::span<Call* const> group = queue_.group_from(head);
    if (!group.empty() && head.group->members.size() > 1) {
        Companions members{{}, Reason::kGroup};
        for (Call* call : group.first(std::min(group.size(), limit))) members.calls.push_back(call);
        return members;
    }
    if (options_.prefix_affinity) return {queue_.sharers_of(head, limit), Reason::kSharers};
    return {{&head}, Reason::kAlone};
}

void Placer::place_set(const Companions& set) {
    const bool is_group = set.reason == Reason::kGroup;
    const std::vector<Choice> plan = planner_.plan(set.calls, is_group, now_us_);
    const auto num_on = [&](const Engine* engine) {
        return std::ranges::count(plan, engine, [](const Choice& choice) { return choice.scored.engine; });
    };
    const auto is_elsewhere = [&](const Choice& choice) {
        return choice.scored.engine != plan.front().scored.engine;
    };
    if (std::ranges::any_of(plan, is_elsewhere)) ++counters_.splits;
    for (const Choice& choice : plan) {
        const bool stands_alone = !is_group && num_on(choice.scored.engine) == 1;
        const Reason own = choice.scored.candidate.prefix_len > 0 ? Reason::kPrefix : Reason::kAlone;
        commit(choice, stands_alone ? own : set.reason);
    }
}

void Placer::commit(const Choice& choice, Reason reason) {
    Call& call = *choice.call;
    Engine& engine = *choice.scored.engine;
    const Candidate& candidate = choice.scored.candidate;
    if (call.held != nullptr) {
        left_.push_back(std::exchange(call.held, nullptr));
        std::erase(holders_, &call);
    }
    const double takes_us = candidate.queue_us + candidate.prefill_us + candidate.decode_us;
    Lane& lane = *call.lane;
    queue_.erase(call);
    const int32_t longest = fleet_.residency().longest(call.path);
    const Residency::Location location = fleet_.admit(call, engine, takes_us, now_us_).location;
    queue_.charge(lane, call.key, call.tokens() - location.prefix_len);
    call.decision = choice.decision;
    count(reason);
    Placement placement{call.spec.call_id, engine.id, kNoContext, 0, reason, candidate.score_us};
    if (options_.prefix_affinity) {
        if (location.prefix_len < longest) ++counters_.replications;
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

void Placer::end_hold(Call& call) {
    if (call.held == nullptr) return;
    fleet_.end_hold(*std::exchange(call.held, nullptr));
    std::erase(holders_, &call);
    queue_.lost_hold();
}

// The call that waits longest, once over the aging time and passed over, has an engine kept free: the one
// where it would be best off takes nothing more until the call fits; else a stream of smaller calls could
// keep it out for ever.
void Placer::hold_an_engine() {
    const auto may_hold = [](const Call& call) {
        const size_t num_engines = call.pool->engines().size();
        const size_t limit = std::max<size_t>(1, num_engines / kEnginesPerHold);
        return static_cast<size_t>(call.pool->num_holds) < std::min(limit, num_engines);
    };
    Call* call = queue_.longest_waiting(now_us_ - options_.aging_us, may_hold);
    if (call == nullptr) return;
    std::vector<Scored> found;
    finder_.evaluate(CallSet(*call), now_us_, false, {}, found);
    const auto best = std::ranges::min_element(found, {}, [](const Scored& scored) {
        return std::pair(scored.candidate.score_us, scored.engine->id);
    });
    if (best == found.end()) return;
    call->held = best->engine;
    fleet_.hold(*call, *best->engine);
    holders_.push_back(call);
    ++counters_.holds;
}

std::vector<Candidate> Placer::candidates_of(const Call& call, int64_t now_us) const {
    return Decisions::best_first(finder_.evaluate_all(CallSet(call), now_us));
}

std::vector<Candidate> Placer::shortlist_of(const Call& call, int64_t now_us) {
    std::vector<Scored> found;
    finder_.evaluate(CallSet(call), now_us, false, {}, found);
    std::vector<Candidate> candidates;
    candidates.reserve(found.size());
    for (const Scored& scored : found) candidates.push_back(scored.candidate);
    return Decisions::best_first(std::move(candidates));
}

}  // namespace parrot::scheduler
