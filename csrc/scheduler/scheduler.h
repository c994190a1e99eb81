// Parrot's scheduler: events in, placements out. No clock, no I/O, one thread; the same events give the same
// placements. Ids that do not exist throw UnknownId, values out of range std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/call_queue.h"
#include "scheduler/decisions.h"
#include "scheduler/flat_map.h"
#include "scheduler/fleet.h"
#include "scheduler/placer.h"
#include "scheduler/prefix_table.h"
#include "scheduler/slab.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Scheduler {
  public:
    Scheduler(const SchedulerOptions& options, const HashKey& hash_key, bool constant_hash);
    Scheduler(const Scheduler&) = delete;
    Scheduler& operator=(const Scheduler&) = delete;

    void add_engine(EngineId engine_id, int64_t model, const CostModel& cost);
    // The engine is gone; returns its calls in flight, which leave the scheduler, in ascending order.
    std::vector<CallId> remove_engine(EngineId engine_id);

    // A paused engine takes no more calls; those it has go on.
    void set_paused(EngineId engine_id, bool paused);
    // The engine's steps take `slowdown` times what its cost model says, until told otherwise.
    void set_slowdown(EngineId engine_id, double slowdown);
    // The engine has measured its steps anew: this is what they take, without any slowdown, from now on. Of
    // `cost` only that is read: capacity and batch stay those that the engine joined with.
    void set_cost(EngineId engine_id, const CostModel& cost);

    // Throws QueueFull when as many calls are queued, of all tenants or of this one, as may be.
    void submit(const CallSpec& spec, std::span<const int32_t> token_ids,
                std::span<const int32_t> boundaries);
    // Unknown calls are ignored: a label may arrive after the call has ended.
    void set_objective(CallId call_id, const Objective& objective);
    bool cancel(CallId call_id);
    // A tenant's share of the work that is placed while several have calls queued; 1 unless told.
    void set_tenant_weight(int64_t tenant, double weight);
    std::vector<Placement> schedule(int64_t now_us);
    void finish(CallId call_id, int64_t now_us, ContextId context_id, int64_t num_tokens);
    // The engine computes a prompt, or a part of one, ahead of the calls that begin with it: it has what lies
    // before the boundaries, or is about to. Ids of contexts that are there already are refused.
    void add_context(EngineId engine_id, ContextId context_id, const PrefixScope& scope,
                     std::span<const int32_t> token_ids, std::span<const int32_t> boundaries);
    // Contexts that the engine does not have are ignored: not every context is a prefix holder.
    void forget_context(EngineId engine_id, ContextId context_id, int64_t remaining);

    // In flight: the candidates of its decision. Queued: what they would be now.
    std::vector<Candidate> explain(CallId call_id);
    // What the candidates would be for a call that is not there; changes nothing.
    std::vector<Candidate> candidates(const CallSpec& spec, std::span<const int32_t> token_ids,
                                      std::span<const int32_t> boundaries, int64_t now_us);
    std::pair<int64_t, int64_t> engine_load(EngineId engine_id) const;
    size_t num_queued() const { return queue_.size(); }
    size_t num_in_flight() const { return slots_.size() - queue_.size(); }
    const Counters& counters() const { return counters_; }
    void check_invariants() const;

  private:
    Engine& engine(EngineId engine_id) const;
    Call* find(CallId call_id);
    Call& call(CallId call_id);
    Path acquire_path(const PrefixScope& scope, std::span<const int32_t> token_ids,
                      std::span<const int32_t> boundaries);
    void end(Call& call);
    void drop(Call& call);

    SchedulerOptions options_;
    PrefixTable table_;
    CallQueue queue_;
    Fleet fleet_;
    Decisions decisions_;
    Counters counters_;
    Placer placer_;
    Slab<Call> calls_;
    FlatMap<CallId, uint32_t> slots_;  // of calls_
    std::vector<CallId> fresh_;        // submitted since the last schedule()
    int64_t now_us_ = 0;               // of the last schedule()
};

}  // namespace parrot::scheduler
