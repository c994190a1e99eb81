#include "scheduler/tenants.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "scheduler/engine_pool.h"

namespace parrot::scheduler {

Lane& Tenants::lane(int64_t id, EnginePool* pool, bool latency) {
    Tenant& tenant = obtain(id);
    for (const auto& lane : tenant.lanes) {
        if (lane->pool == pool && lane->latency == latency) return *lane;
    }
    tenant.lanes.push_back(std::make_unique<Lane>());
    Lane& lane = *tenant.lanes.back();
    lane.tenant = &tenant;
    lane.pool = pool;
    lane.latency = latency;
    return lane;
}

void Tenants::set_weight(int64_t tenant, double weight) { obtain(tenant).weight = weight; }

int64_t Tenants::num_queued(int64_t id) const {
    Tenant* const* tenant = by_id_.find(id);
    return tenant == nullptr ? 0 : (*tenant)->num_queued;
}

void Tenants::enter(Lane& lane) {
    Tenant& tenant = *lane.tenant;
    if (tenant.num_queued++ > 0) return;
    tenant.virtual_time = std::max(tenant.virtual_time, virtual_time_);
    waiting_.insert(place_of(tenant));
}

void Tenants::leave(Lane& lane) {
    Tenant& tenant = *lane.tenant;
    if (--tenant.num_queued == 0) waiting_.erase(place_of(tenant));
}

void Tenants::charge(Lane& lane, const QueueKey& key, double tokens, double turn, uint64_t run) {
    Tenant& tenant = *lane.tenant;
    lane.placed_key = lane.placed_run == run ? std::max(lane.placed_key, key) : key;
    lane.placed_run = run;
    lane.pool->note_placed(turn, tenant.id, run);
    virtual_time_ = std::max(virtual_time_, tenant.virtual_time);
    auto place = waiting_.extract(place_of(tenant));  // none if that was its last call
    tenant.virtual_time += std::max(1.0, tokens) / tenant.weight;
    if (place.empty()) return;
    place.value() = place_of(tenant);
    waiting_.insert(std::move(place));
}

// Room is left; or it went to a tenant whose turn was later; or to a later call of the tenant's own.
bool Tenants::is_passed_over(const Lane& lane, uint64_t run) const {
    const Tenant& tenant = *lane.tenant;
    if (lane.pool->has_room() || lane.pool->has_placed_after(tenant.virtual_time, tenant.id, run))
        return true;
    const QueueKey& key = lane.calls.front().key;
    return std::ranges::any_of(tenant.lanes, [&](const std::unique_ptr<Lane>& other) {
        return other->pool == lane.pool && other->placed_run == run && key < other->placed_key;
    });
}

// Turns only come later in a pass, so that who is set aside stays before all who are not.
Tenant* Tenants::first(uint64_t pass) {
    const auto next = pass == aside_pass_ ? waiting_.upper_bound(aside_) : waiting_.begin();
    return next == waiting_.end() ? nullptr : next->tenant;
}

void Tenants::set_aside(Tenant& tenant, uint64_t pass) {
    aside_ = place_of(tenant);
    aside_pass_ = pass;
}

Tenant& Tenants::obtain(int64_t id) {
    if (Tenant** known = by_id_.find(id)) return **known;
    forget_idle();
    tenants_.push_back(std::make_unique<Tenant>());
    Tenant& tenant = *tenants_.back();
    tenant.id = id;
    by_id_.insert(id, &tenant);
    return tenant;
}

// Idle tenants of ordinary weight whose share is used up by no one are as good as unknown.
void Tenants::forget_idle() {
    if (tenants_.size() < forget_at_) return;
    std::erase_if(tenants_, [&](const std::unique_ptr<Tenant>& tenant) {
        const bool goes =
            tenant->num_queued == 0 && tenant->weight == 1 && tenant->virtual_time <= virtual_time_;
        if (goes) by_id_.erase(tenant->id);
        return goes;
    });
    forget_at_ = std::max<size_t>(1024, 2 * tenants_.size());
}

void Tenants::check_invariants() const {
    size_t num_waiting = 0;
    for (const auto& tenant : tenants_) {
        size_t queued = 0;
        for (const auto& lane : tenant->lanes) queued += lane->calls.size();
        num_waiting += queued > 0 ? 1 : 0;
        if (queued != static_cast<size_t>(tenant->num_queued)) {
            throw std::logic_error("tenant " + std::to_string(tenant->id) + " counts " +
                                   std::to_string(tenant->num_queued) + " queued calls of " +
                                   std::to_string(queued));
        }
    }
    const auto is_current = [](const Place& place) {
        return place.virtual_time == place.tenant->virtual_time && place.tenant->num_queued > 0;
    };
    if (num_waiting != waiting_.size() || !std::ranges::all_of(waiting_, is_current))
        throw std::logic_error("the list of waiting tenants is off");
}

}  // namespace parrot::scheduler
