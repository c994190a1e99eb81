// Values that cross the scheduler's border, and a call. Times are microseconds of the caller's clock.
#pragma once

#include <compare>
#include <cstdint>
#include <limits>

#include "scheduler/prefix_table.h"

namespace parrot::scheduler {

using CallId = int64_t;
using EngineId = int64_t;
using ContextId = int64_t;
inline constexpr ContextId kNoContext = 0;
inline constexpr int64_t kNoTime = std::numeric_limits<int64_t>::max();
inline constexpr uint32_t kNoSlot = std::numeric_limits<uint32_t>::max();

struct SchedulerOptions {
    bool group_placement = true;
    bool prefix_affinity = true;
    bool splitting = true;
    bool replication = true;
    bool objective_aware = true;
    bool application_order = true;
    bool tenant_shares = true;
    bool aging = true;
    int64_t latency_capacity_tokens = 6144;
    int64_t aging_us = 10'000'000;
    int64_t max_queued = 1'000'000;
    int64_t max_queued_per_tenant = 1'000'000;
    bool full_scan = false;  // looks at every call and every engine each time: slow, the same decisions
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

// What a label, or what was deduced from one, says of a call.
struct Objective {
    bool latency = false;
    int64_t group_id = -1;
    int32_t depth = 0;
    int64_t start_by_us = kNoTime;
    double per_token_us = 0;
};

struct CallSpec {
    CallId call_id = 0;
    int64_t app_id = 0;
    int64_t app_arrival_us = 0;
    int64_t submit_us = 0;
    int64_t app_ran_us = kNoTime;  // in which some call of its application was in flight; kNoTime: all since
    PrefixScope scope;             // its model is that of the engines the call may go to
    int64_t tenant = 0;
    int64_t group_id = -1;  // < 0: none; unique within an application only
    int32_t depth = 0;
    int32_t max_new_tokens = 0;
    int64_t start_by_us = kNoTime;  // a target in time: the latest start that keeps it
    double per_token_us = 0;        // what each generated token may take; 0: no target
    bool latency = false;

    bool is_targeted() const { return latency && per_token_us > 0; }
};

enum class Reason : uint8_t { kGroup, kSharers, kPrefix, kAlone };

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
};

struct Counters {
    int64_t placed = 0;
    int64_t placed_group = 0;
    int64_t placed_sharers = 0;
    int64_t placed_prefix = 0;
    int64_t placed_alone = 0;
    int64_t splits = 0;
    int64_t replications = 0;  // calls placed where less of their prompt is than some other engine has
    int64_t deferred = 0;
    int64_t holds = 0;
};

// Smaller goes first.
struct QueueKey {
    int64_t priority_us = std::numeric_limits<int64_t>::min();  // see CallQueue::key_of
    int32_t negative_depth = 0;
    CallId call_id = 0;
    auto operator<=>(const QueueKey&) const = default;
};

struct Engine;
class EnginePool;
struct Lane;
struct TaskGroup;

// A call from submit until it finishes or is cancelled: queued while `engine` is null, else in flight.
struct Call {
    CallSpec spec;
    Path path;
    QueueKey key;  // while queued
    EnginePool* pool = nullptr;
    Lane* lane = nullptr;        // while queued
    TaskGroup* group = nullptr;  // while queued
    Engine* engine = nullptr;    // while in flight
    Engine* held = nullptr;      // while queued: the engine kept free for it
    int64_t expected_finish_us = 0;
    uint64_t tried_pass = 0;  // the last pass of schedule() that looked at it
    uint32_t slot = 0;
    uint32_t position = 0;        // in the engine's calls
    uint32_t decision = kNoSlot;  // while in flight
    int32_t prompt_len = 0;
    bool fresh = false;  // while queued: no pass has ended since it came

    int32_t tokens() const { return prompt_len + spec.max_new_tokens; }  // each is below 2^30
    // Tokens that no prefix covers, so that no other call can share them.
    int64_t own_tokens() const { return int64_t{tokens()} - (path.empty() ? 0 : path.back().length); }
};

}  // namespace parrot::scheduler
