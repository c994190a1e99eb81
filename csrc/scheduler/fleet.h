// All engines with the calls and contexts they hold. Keeps each engine's load equal to its calls in flight.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/engine.h"
#include "scheduler/engine_pool.h"
#include "scheduler/flat_map.h"
#include "scheduler/prefix_table.h"
#include "scheduler/residency.h"
#include "scheduler/slab.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Fleet {
  public:
    Fleet(const SchedulerOptions& options, PrefixTable& table) : options_(options), table_(table) {}

    // The engines of a model; made where missing, since calls may come before their first engine.
    EnginePool& pool(int64_t model);
    Engine& add(EngineId id, int64_t model, const CostModel& cost);
    // The engine must have no call in flight and no holder any more; its contexts are forgotten.
    void remove(Engine& engine);
    Engine* find(EngineId id) const;
    Engine* at_slot(int32_t slot) const { return by_slot_[static_cast<size_t>(slot)].get(); }
    size_t num_slots() const { return by_slot_.size(); }

    // What is needed to take back an admission; the last one first.
    struct Admission {
        Residency::Location location;
        double prefill_until_us = 0;
    };
    // `takes_us`: how long the call is expected to take.
    Admission admit(Call& call, Engine& engine, double takes_us, int64_t now_us);
    void take_back(Call& call, const Admission& admission);
    void release(Call& call);
    void set_latency(Call& call, bool latency, double per_token_us);
    // Keeps the engine free for the call; and the end of that.
    void hold(Call& call, Engine& engine);
    void end_hold(Engine& engine);

    // The call leaves its engine; the first `length` tokens of its prompt stay there as a context, up to the
    // last boundary within them. Takes over the references of the call's path.
    void leave_context(Call& call, ContextId context, int64_t length);
    bool has_context(ContextId context) const { return context_slots_.find(context) != nullptr; }
    // A context that is not there yet, of no call. Takes over the references of the path.
    void add_context(Engine& engine, ContextId context, Path path);
    // Keeps only the boundaries within the first `length` tokens. Unknown contexts are ignored.
    void shorten_context(ContextId context, const Engine& engine, int64_t length);

    void release_path(std::span<const PathEntry> path);
    void grow(size_t num_slots) { residency_.grow(num_slots); }
    const Residency& residency() const { return residency_; }
    size_t num_contexts() const { return contexts_.size(); }

    template <class Visit>
    void for_each_pool(Visit visit) {
        for (auto& [model, pool] : pools_) visit(pool);
    }

    // Whether some call may enter some engine.
    bool has_room() const {
        return std::ranges::any_of(pools_, [](const auto& pool) { return pool.second.has_room(); });
    }

    // Throws std::logic_error unless engine counters equal what `calls` say.
    void check_invariants(const std::vector<const Call*>& calls) const;

  private:
    struct Context {
        ContextId id = kNoContext;
        Engine* engine = nullptr;
        Path path;
        uint32_t position = 0;  // in the engine's contexts
    };

    void remove_call(Call& call);
    void keep_context(Engine& engine, ContextId context, Path path);
    void forget_context(uint32_t slot);

    SchedulerOptions options_;
    PrefixTable& table_;
    Residency residency_;
    std::map<int64_t, EnginePool> pools_;  // by model
    std::vector<std::unique_ptr<Engine>> by_slot_;
    std::vector<int32_t> free_slots_;
    FlatMap<EngineId, Engine*> by_id_;
    Slab<Context> contexts_;
    FlatMap<ContextId, uint32_t> context_slots_;
};

}  // namespace parrot::scheduler
