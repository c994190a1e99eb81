#include "scheduler/residency.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace parrot::scheduler {

namespace {

int64_t num_tokens(const PathEntry& step) { return int64_t{step.length} - step.previous; }

}  // namespace

void ContextSet::insert(ContextId context) {
    if (newest_ == kNoContext) {
        newest_ = context;
        return;
    }
    if (context > newest_) std::swap(context, newest_);
    older_.insert(std::ranges::lower_bound(older_, context), context);
}

void ContextSet::erase(ContextId context) {
    if (context != newest_) {
        older_.erase(std::ranges::lower_bound(older_, context));
    } else if (older_.empty()) {
        newest_ = kNoContext;
    } else {
        newest_ = older_.back();
        older_.pop_back();
    }
}

void Residency::grow(size_t num_slots) {
    if (num_slots > holders_.size()) holders_.resize(num_slots);
}

TokenCount Residency::add_call(const Call& call, int32_t engine_slot) {
    const bool latency = call.spec.latency;
    TokenCount added{call.own_tokens(), latency ? call.own_tokens() : 0};
    for (const PathEntry& step : call.path) {
        Resident& resident = obtain(step, engine_slot);
        if (resident.num_calls++ == 0) added.all += num_tokens(step);
        if (latency && resident.num_latency++ == 0) added.latency += num_tokens(step);
    }
    return added;
}

TokenCount Residency::remove_call(const Call& call, int32_t engine_slot) {
    const bool latency = call.spec.latency;
    TokenCount removed{call.own_tokens(), latency ? call.own_tokens() : 0};
    for (const PathEntry& step : call.path) {
        Resident& resident = at(step, engine_slot);
        if (--resident.num_calls == 0) removed.all += num_tokens(step);
        if (latency && --resident.num_latency == 0) removed.latency += num_tokens(step);
        drop_if_empty(resident);
    }
    return removed;
}

int64_t Residency::set_latency(const Call& call, int32_t engine_slot, bool latency) {
    int64_t changed = call.own_tokens();
    for (const PathEntry& step : call.path) {
        Resident& resident = at(step, engine_slot);
        const bool is_edge = latency ? resident.num_latency++ == 0 : --resident.num_latency == 0;
        if (is_edge) changed += num_tokens(step);
    }
    return changed;
}

void Residency::add_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot) {
    for (const PathEntry& step : path) obtain(step, engine_slot).contexts.insert(context);
}

void Residency::remove_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot) {
    for (const PathEntry& step : path) {
        Resident& resident = at(step, engine_slot);
        resident.contexts.erase(context);
        drop_if_empty(resident);
    }
}

const Resident* Residency::first(NodeId node, int32_t engine_slot) const {
    if (holders_[node].count == 0) return nullptr;
    const uint32_t* slot = by_key_.find(key(node, engine_slot));
    return slot == nullptr ? nullptr : &residents_[*slot];
}

std::span<const int32_t> Residency::engines_of(NodeId node) const {
    const Holders& holders = holders_[node];
    if (holders.list != kNoSlot) return lists_[holders.list];
    return {&holders.only, holders.count};
}

int32_t Residency::longest(std::span<const PathEntry> path) const {
    for (size_t i = path.size(); i-- > 0;) {
        if (holders_[path[i].node].count > 0) return path[i].length;
    }
    return 0;
}

Residency::Location Residency::locate(std::span<const PathEntry> path, int32_t engine_slot) const {
    for (size_t i = path.size(); i-- > 0;) {
        const Resident* resident = first(path[i].node, engine_slot);
        if (resident == nullptr) continue;
        Location location{path[i].length, kNoContext};
        for (; resident != nullptr; resident = next(*resident)) {
            location.context = std::max(location.context, resident->contexts.newest());
        }
        return location;
    }
    return {};
}

Resident* Residency::find(const PathEntry& step, int32_t engine_slot) {
    const uint32_t* first = by_key_.find(key(step.node, engine_slot));
    if (first == nullptr) return nullptr;
    for (uint32_t slot = *first; slot != kNoSlot; slot = residents_[slot].next) {
        if (residents_[slot].previous == step.previous) return &residents_[slot];
    }
    return nullptr;
}

Resident& Residency::at(const PathEntry& step, int32_t engine_slot) {
    Resident* resident = find(step, engine_slot);
    if (resident == nullptr) throw std::logic_error("an engine lacks a prefix that it was given");
    return *resident;
}

Resident& Residency::obtain(const PathEntry& step, int32_t engine_slot) {
    if (Resident* known = find(step, engine_slot)) return *known;
    const uint32_t slot = residents_.take();
    Resident& resident = residents_[slot];
    resident.node = step.node;
    resident.engine_slot = engine_slot;
    resident.previous = step.previous;
    const auto [first, is_new] = by_key_.insert(key(step.node, engine_slot), slot);
    if (is_new) {
        resident.position = add_holder(step.node, engine_slot);
    } else {
        resident.next = std::exchange(residents_[*first].next, slot);
    }
    return resident;
}

void Residency::drop_if_empty(Resident& resident) {
    if (!resident.empty()) return;
    uint32_t* first = by_key_.find(key(resident.node, resident.engine_slot));
    uint32_t slot = *first;
    if (&residents_[slot] != &resident) {
        uint32_t before = slot;
        while (&residents_[residents_[before].next] != &resident) before = residents_[before].next;
        slot = residents_[before].next;
        residents_[before].next = resident.next;
    } else if (resident.next != kNoSlot) {
        residents_[resident.next].position = resident.position;
        *first = resident.next;
    } else {
        remove_holder(resident.node, resident.position);
        by_key_.erase(key(resident.node, resident.engine_slot));
    }
    residents_.give(slot);
}

uint32_t Residency::add_holder(NodeId node, int32_t engine_slot) {
    Holders& holders = holders_[node];
    if (holders.count == 0) {
        holders.only = engine_slot;
    } else {
        if (holders.list == kNoSlot) {
            holders.list = lists_.take();
            lists_[holders.list].assign(1, holders.only);
        }
        lists_[holders.list].push_back(engine_slot);
    }
    return holders.count++;
}

void Residency::remove_holder(NodeId node, uint32_t position) {
    Holders& holders = holders_[node];
    --holders.count;
    if (holders.list == kNoSlot) return;
    std::vector<int32_t>& list = lists_[holders.list];
    const int32_t moved = list.back();
    list[position] = moved;
    list.pop_back();
    if (position < list.size()) residents_[*by_key_.find(key(node, moved))].position = position;
    if (list.empty()) lists_.give(std::exchange(holders.list, kNoSlot));
}

}  // namespace parrot::scheduler
