// What the scheduler knows about one engine: its cost model and the calls it has there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <unordered_set>

#include "scheduler/types.h"

namespace parrot::scheduler {

struct Engine {
    EngineId id = 0;
    int32_t slot = 0;  // dense, for arrays by engine; used again after removal
    CostModel cost;
    std::set<CallId> in_flight;
    std::unordered_set<ContextId> contexts;

    int32_t num_latency = 0;  // of in_flight
    int64_t load_tokens = 0;  // held when every call has generated all it may, shared prefixes counted once
    int64_t latency_tokens = 0;  // the part of load_tokens that latency-bound calls hold
    int64_t new_tokens = 0;      // the part of load_tokens that is still to be generated
    double expected_finish_sum_us = 0;
    double prefill_until_us = 0;  // when the prompts placed so far are expected to be computed
    bool held = false;            // kept free for a call that has waited long (within one schedule())

    int32_t batch() const { return static_cast<int32_t>(in_flight.size()); }
    // On average a call in flight has generated half of what it may.
    double kv_tokens() const {
        return static_cast<double>(load_tokens) - static_cast<double>(new_tokens) / 2;
    }

    bool has_room() const {
        if (held) return false;
        return in_flight.empty() || (batch() < cost.max_batch_size && load_tokens < cost.capacity_tokens);
    }

    // One step of a typical batch, to compare engines of unequal speed.
    double pace_us() const { return cost.step_us(16, 16 * 512); }

    int64_t mixing_bound(int64_t latency_capacity_tokens) const {
        return std::min(latency_capacity_tokens, cost.capacity_tokens);
    }
};

}  // namespace parrot::scheduler
