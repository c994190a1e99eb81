#include "scheduler/shortlist.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace parrot::scheduler {

namespace {

// So many engines that are least loaded, and of each of the deepest boundaries that some engine has, a few
// engines or the best of many.
constexpr size_t kLeastLoaded = 8;
constexpr size_t kMaxBoundaries = 4;
constexpr size_t kFewHolders = 8;
constexpr size_t kBestHolders = 8;

// Calls are much alike when their tokens differ by less than one in so many.
constexpr double kAlike = 16;

}  // namespace

std::span<Engine* const> Shortlist::find(const CallSet& calls, int64_t now_us, bool admissible,
                                         std::span<Engine* const> besides) {
    ++search_;
    seen_.resize(fleet_.num_slots());
    find_least_loaded(calls, now_us, admissible);
    found_ = least_loaded_;
    for (const Engine* engine : found_) is_new(*engine);
    for (Engine* engine : besides) {
        if (is_new(*engine)) found_.push_back(engine);
    }
    if (options_.prefix_affinity) add_holders(calls, now_us, admissible);
    Engine* held = calls.only == nullptr ? nullptr : calls.only->held;
    if (held != nullptr && is_new(*held)) found_.push_back(held);
    return found_;
}

// Engines with the prefix that most have are looked at as its holders, and not here.
void Shortlist::find_least_loaded(const CallSet& calls, int64_t now_us, bool admissible) {
    const CallShape shape = calls.shape();
    const NodeId node = options_.prefix_affinity ? widest(calls) : kNoNode;
    if (alike_ && serves(shape, node)) {
        ++num_served_;
        return;
    }
    EnginePool::Slots slots;
    if (node != kNoNode) slots.engines = fleet_.residency().engines_of(node);
    calls.pool->least_loaded(shape, now_us, kLeastLoaded, admissible, slots, least_loaded_);
    num_served_ = 1;
    served_ = shape;
    served_widest_ = node;
}

// The boundary that most engines have, if those are not just a few.
NodeId Shortlist::widest(const CallSet& calls) const {
    NodeId widest = kNoNode;
    size_t most = kFewHolders;
    for (const PathEntry& entry : calls.entries) {
        const size_t num_engines = fleet_.residency().engines_of(entry.node).size();
        if (num_engines <= most) continue;
        most = num_engines;
        widest = entry.node;
    }
    return widest;
}

// Engines of the deepest boundaries, and of the one that most have. Of many the best, as far as that can be
// said without a look at each: as if all had the prefix in calls in flight.
void Shortlist::add_holders(const CallSet& calls, int64_t now_us, bool admissible) {
    size_t num_boundaries = 0;
    const NodeId widest_node = widest(calls);
    for (size_t i = calls.entries.size(); i-- > 0;) {
        const PathEntry& entry = calls.entries[i];
        const std::span<const int32_t> slots = fleet_.residency().engines_of(entry.node);
        if (slots.empty() || (num_boundaries >= kMaxBoundaries && entry.node != widest_node)) continue;
        ++num_boundaries;
        if (slots.size() > kFewHolders) {
            CallShape rest = calls.shape();
            rest.cached_tokens = entry.length;
            rest.prompt_tokens = std::max(rest.num_calls, rest.prompt_tokens - rest.cached_tokens);
            calls.pool->least_loaded(rest, now_us, kBestHolders, admissible, {slots, true}, holders_);
        } else {
            holders_.clear();
            for (const int32_t slot : slots) holders_.push_back(fleet_.at_slot(slot));
        }
        for (Engine* engine : holders_) {
            const bool counts = admissible ? engine->has_room() : !engine->is_closed();
            if (counts && is_new(*engine)) found_.push_back(engine);
        }
    }
}

std::span<Engine* const> Shortlist::other_holders(const CallSet& calls) {
    holders_.clear();
    for (const PathEntry& entry : calls.entries) {
        for (const int32_t slot : fleet_.residency().engines_of(entry.node)) {
            Engine* engine = fleet_.at_slot(slot);
            if (engine->has_room() && is_new(*engine)) holders_.push_back(engine);
        }
    }
    return holders_;
}

void Shortlist::set_alike(bool alike) {
    alike_ = alike;
    num_served_ = 0;
}

bool Shortlist::serves(const CallShape& shape, NodeId widest) const {
    const auto is_near = [](double one, double other) { return std::abs(one - other) * kAlike <= one; };
    return num_served_ > 0 && num_served_ < kLeastLoaded && widest == served_widest_ &&
           shape.num_calls == served_.num_calls && shape.latency == served_.latency &&
           is_near(shape.prompt_tokens, served_.prompt_tokens) &&
           is_near(shape.new_tokens, served_.new_tokens);
}

bool Shortlist::is_new(const Engine& engine) {
    return std::exchange(seen_[static_cast<size_t>(engine.slot)], search_) != search_;
}

}  // namespace parrot::scheduler
