// Values that cross the scheduler's border. Times are microseconds of the caller's clock.
#pragma once

#include <compare>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/prefix_table.h"

namespace parrot::scheduler {

using CallId = int64_t;
using EngineId = int64_t;
using ContextId = int64_t;
inline constexpr ContextId kNoContext = 0;

struct SchedulerOptions {
    bool group_placement = true;
    bool prefix_affinity = true;
    bool objective_aware = true;
    bool application_order = true;
    int64_t latency_capacity_tokens = 6144;
    int64_t aging_us = 10'000'000;
};

// step_us = base + per_sequence * batch + per_prefill_token * prefill + per_kv_token * KV tokens loaded.
struct CostModel {
    double base_us = 0;
    double per_sequence_us = 0;
    double per_prefill_token_us = 0;
    double per_kv_token_us = 0;
    int64_t capacity_tokens = 0;
    int32_t max_batch_size = 0;

    double step_us(double batch, double kv_tokens) const {
        return base_us + per_sequence_us * batch + per_kv_token_us * kv_tokens;
    }
};

struct CallSpec {
    CallId call_id = 0;
    int64_t app_id = 0;
    int64_t app_arrival_us = 0;
    int64_t submit_us = 0;
    PrefixScope scope;
    bool latency = false;
    int64_t group_id = -1;  // < 0: none; unique within an application only
    int32_t depth = 0;
    int32_t max_new_tokens = 0;
};

enum class Reason { kGroup, kSharers, kPrefix, kAlone };

struct Placement {
    CallId call_id = 0;
    EngineId engine_id = 0;
    ContextId parent_context_id = kNoContext;
    int32_t prefix_len = 0;
    Reason reason = Reason::kAlone;
    double score_us = 0;
};

struct Candidate {
    EngineId engine_id = 0;
    bool admissible = false;
    int32_t prefix_len = 0;
    double queue_us = 0;
    double prefill_us = 0;
    double decode_us = 0;
    double harm_us = 0;
    double score_us = 0;
    double step_us = 0;     // one decode step at the resulting batch
    double compute_us = 0;  // the part of prefill_us that grows with the uncached tokens
};

struct Counters {
    int64_t placed = 0;
    int64_t placed_group = 0;
    int64_t placed_sharers = 0;
    int64_t placed_prefix = 0;
    int64_t placed_alone = 0;
    int64_t splits = 0;
    int64_t deferred = 0;
};

// Smaller goes first.
struct QueueKey {
    int64_t priority_us = 0;  // see CallQueue::key_of
    int32_t negative_depth = 0;
    CallId call_id = 0;
    auto operator<=>(const QueueKey&) const = default;
};

struct Engine;

// A call from submit until it finishes or is cancelled: queued while `engine` is null, else in flight.
struct Call {
    CallSpec spec;
    int32_t prompt_len = 0;
    Path path;
    QueueKey key;             // while queued
    uint64_t tried_pass = 0;  // the last pass of schedule() that looked at it
    Engine* engine = nullptr;
    double expected_finish_us = 0;                           // while in flight
    std::shared_ptr<const std::vector<Candidate>> decision;  // while in flight

    // Tokens that no prefix covers, so that no other call can share them.
    int64_t own_tokens() const {
        return prompt_len - (path.empty() ? 0 : path.back().length) + int64_t{spec.max_new_tokens};
    }
};

}  // namespace parrot::scheduler
