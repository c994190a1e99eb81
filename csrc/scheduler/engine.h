// What the scheduler knows about one engine: its cost model and the calls it has there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "scheduler/types.h"

namespace parrot::scheduler {

__extension__ using Sum = __int128;  // of times, of which some calls' do not fit int64

struct Engine {
    EngineId id = 0;
    int32_t slot = 0;  // dense, for arrays by engine; used again after removal
    EnginePool* pool = nullptr;
    uint32_t row = 0;    // in the pool
    CostModel cost;      // of now: `measured` times `slowdown`
    CostModel measured;  // when it joined, or by what it said since
    double slowdown = 1;
    bool paused = false;             // takes no calls; those it has go on
    int64_t bound = 0;               // of mixed tokens: what it may hold beside its latency-bound calls
    int64_t plain_bound = 0;         // the same beside one whose target is not known
    int64_t pace_ns = 0;             // one step of a typical batch, to compare engines of unequal speed
    std::vector<Call*> calls;        // in flight, in no order
    std::vector<uint32_t> contexts;  // slots of Fleet, in no order

    int32_t num_latency = 0;   // of calls
    int32_t num_targeted = 0;  // of latency-bound calls: those that say what a token may take
    int64_t load_tokens = 0;   // held when every call has generated all it may, shared prefixes counted once
    int64_t latency_tokens = 0;  // the part of load_tokens that latency-bound calls hold
    int64_t new_tokens = 0;      // the part of load_tokens that is still to be generated
    Sum expected_finish_sum_us = 0;
    double prefill_until_us = 0;  // when the prompts placed so far are expected to be computed
    Call* held_for = nullptr;     // a call that has waited long: nothing else enters until it fits
    bool changed = false;         // its room has grown since the last schedule()

    int32_t batch() const { return static_cast<int32_t>(calls.size()); }
    // Nothing enters but a call that it is held for.
    bool is_closed() const { return paused || held_for != nullptr; }
    // On average a call in flight has generated half of what it may.
    double kv_tokens() const {
        return static_cast<double>(load_tokens) - static_cast<double>(new_tokens) / 2;
    }
    double mean_finish_us() const {
        return calls.empty() ? 0 : static_cast<double>(expected_finish_sum_us) / batch();
    }

    // Whether some call may enter.
    bool has_room() const {
        if (is_closed()) return false;
        return calls.empty() || (batch() < cost.max_batch_size && load_tokens < cost.capacity_tokens);
    }

    // Tokens that one call of this objective, or (`is_set`) several at once, may add; below 0: none enters.
    // Size keeps no call out of an empty engine, nor the first latency-bound one from work that fits.
    int64_t room(bool latency, bool objective_aware, bool is_set = false) const {
        if (!has_room()) return -1;
        if (calls.empty() && !is_set) return std::numeric_limits<int64_t>::max();
        const int64_t capacity = cost.capacity_tokens - load_tokens;
        if (!objective_aware) return capacity;
        if (!latency) return num_latency == 0 ? capacity : std::min(capacity, bound - load_tokens);
        const bool is_first = num_latency == 0 && !is_set;
        return is_first ? capacity : std::min(capacity, latency_bound() - latency_tokens);
    }

    // Of the tokens of latency-bound calls.
    int64_t latency_bound() const { return std::min(bound, plain_bound); }
};

}  // namespace parrot::scheduler
