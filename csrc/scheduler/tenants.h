// Weighted fair sharing between tenants: start-time fair queueing over the work that calls are estimated to
// be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "scheduler/flat_map.h"
#include "scheduler/ordered_calls.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

struct Tenant;

// The queued calls of one tenant for one model and objective, in order.
struct Lane {
    Tenant* tenant = nullptr;
    EnginePool* pool = nullptr;
    bool latency = false;
    OrderedCalls calls;
    uint64_t pass = 0;  // the pass of schedule() that `cursor` is of
    QueueKey cursor;    // the last call that was looked at

    uint64_t placed_run = 0;  // the last schedule() that placed a call of the lane
    QueueKey placed_key;      // the last in order that it placed
};

struct Tenant {
    int64_t id = 0;
    double weight = 1;
    double virtual_time = 0;  // tokens placed over weight; the least goes first
    int64_t num_queued = 0;
    std::vector<std::unique_ptr<Lane>> lanes;
};

class Tenants {
  public:
    // Made where missing.
    Lane& lane(int64_t tenant, EnginePool* pool, bool latency);
    void set_weight(int64_t tenant, double weight);
    int64_t num_queued(int64_t tenant) const;

    // A call enters or leaves a lane. A tenant that had none queued starts level with the one served last:
    // what it did not use is not kept for it.
    void enter(Lane& lane);
    void leave(Lane& lane);
    // A call of the lane, with `tokens` of work, is placed; `turn` is the virtual time that its tenant had
    // when the decision was its turn.
    void charge(Lane& lane, const QueueKey& key, double tokens, double turn, uint64_t run);
    // Whether this schedule() had room for a call that comes after the first one of the lane.
    bool is_passed_over(const Lane& lane, uint64_t run) const;

    // The tenant with queued calls that has had the least for its weight (then the lowest id), of those not
    // set aside in this pass; null if none.
    Tenant* first(uint64_t pass);
    void set_aside(Tenant& tenant, uint64_t pass);

    template <class Visit>
    void for_each_lane(Visit visit) const {
        for (const Place& place : waiting_) {
            for (const auto& lane : place.tenant->lanes) {
                if (!lane->calls.empty()) visit(*lane);
            }
        }
    }

    void check_invariants() const;

  private:
    // Of a tenant with queued calls, in the order of turns.
    struct Place {
        double virtual_time = -1;  // before all tenants
        int64_t id = 0;
        Tenant* tenant = nullptr;

        bool operator<(const Place& other) const {
            return std::tie(virtual_time, id) < std::tie(other.virtual_time, other.id);
        }
    };

    static Place place_of(Tenant& tenant) { return {tenant.virtual_time, tenant.id, &tenant}; }
    Tenant& obtain(int64_t tenant);
    void forget_idle();

    std::vector<std::unique_ptr<Tenant>> tenants_;
    FlatMap<int64_t, Tenant*> by_id_;
    std::set<Place> waiting_;
    Place aside_;  // the last that was set aside in `aside_pass_`: so were all before it
    uint64_t aside_pass_ = 0;
    double virtual_time_ = 0;  // of the tenant served last, when it was served
    size_t forget_at_ = 1024;  // so many tenants are known before idle ones are looked for
};

}  // namespace parrot::scheduler
