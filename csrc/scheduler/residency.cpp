#include "scheduler/residency.h"

#include <algorithm>
#include <utility>

namespace parrot::scheduler {

namespace {

auto position(auto& residents, int32_t engine_slot, int32_t previous) {
    const auto before = [](const Resident& resident, const std::pair<int32_t, int32_t>& key) {
        return std::pair(resident.engine_slot, resident.previous) < key;
    };
    return std::lower_bound(residents.begin(), residents.end(), std::pair(engine_slot, previous), before);
}

int64_t num_tokens(const PathEntry& step) { return int64_t{step.length} - step.previous; }

}  // namespace

void Residency::grow(size_t num_slots) { residents_.resize(std::max(residents_.size(), num_slots)); }

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
        Resident& resident = obtain(step, engine_slot);
        if (--resident.num_calls == 0) removed.all += num_tokens(step);
        if (latency && --resident.num_latency == 0) removed.latency += num_tokens(step);
        drop_if_empty(step, engine_slot);
    }
    return removed;
}

int64_t Residency::set_latency(const Call& call, int32_t engine_slot, bool latency) {
    int64_t changed = call.own_tokens();
    for (const PathEntry& step : call.path) {
        Resident& resident = obtain(step, engine_slot);
        const bool is_edge = latency ? resident.num_latency++ == 0 : --resident.num_latency == 0;
        if (is_edge) changed += num_tokens(step);
    }
    return changed;
}

void Residency::add_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot) {
    for (const PathEntry& step : path) {
        std::vector<ContextId>& contexts = obtain(step, engine_slot).contexts;
        contexts.insert(std::lower_bound(contexts.begin(), contexts.end(), context), context);
    }
}

void Residency::remove_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot) {
    for (const PathEntry& step : path) {
        std::vector<ContextId>& contexts = obtain(step, engine_slot).contexts;
        contexts.erase(std::lower_bound(contexts.begin(), contexts.end(), context));
        drop_if_empty(step, engine_slot);
    }
}

Residency::Location Residency::locate(std::span<const PathEntry> path, int32_t engine_slot) const {
    for (size_t i = path.size(); i-- > 0;) {
        const std::vector<Resident>& residents = residents_[path[i].node];
        auto resident = position(residents, engine_slot, 0);
        if (resident == residents.end() || resident->engine_slot != engine_slot) continue;
        Location location{path[i].length, kNoContext};
        for (; resident != residents.end() && resident->engine_slot == engine_slot; ++resident) {
            if (resident->contexts.empty()) continue;
            location.context = std::max(location.context, resident->contexts.back());
        }
        return location;
    }
    return {};
}

Resident& Residency::obtain(const PathEntry& step, int32_t engine_slot) {
    std::vector<Resident>& residents = residents_[step.node];
    auto resident = position(residents, engine_slot, step.previous);
    if (resident == residents.end() || resident->engine_slot != engine_slot ||
        resident->previous != step.previous) {
        resident = residents.insert(resident, Resident{engine_slot, step.previous, 0, 0, {}});
    }
    return *resident;
}

void Residency::drop_if_empty(const PathEntry& step, int32_t engine_slot) {
    std::vector<Resident>& residents = residents_[step.node];
    const auto resident = position(residents, engine_slot, step.previous);
    if (resident->empty()) residents.erase(resident);
}

}  // namespace parrot::scheduler
