// All engines with the calls and contexts they hold. Keeps each engine's load equal to its calls in flight.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "scheduler/engine.h"
#include "scheduler/prefix_table.h"
#include "scheduler/residency.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

class Fleet {
  public:
    explicit Fleet(PrefixTable& table) : table_(table) {}

    Engine& add(EngineId id, const CostModel& cost);
    // The engine must have no call in flight any more; its contexts are forgotten.
    void remove(Engine& engine);
    Engine* find(EngineId id) const;
    std::span<Engine* const> engines() const { return ordered_; }  // ascending by id

    // What is needed to take back an admission; the last one first.
    struct Admission {
        Residency::Location location;
        double prefill_until_us = 0;
        double expected_finish_sum_us = 0;
    };
    // `estimate` gives the time at which the call is expected to finish.
    Admission admit(Call& call, Engine& engine, const Candidate& estimate, int64_t now_us);
    void take_back(Call& call, const Admission& admission);
    void release(Call& call);
    void set_latency(Call& call, bool latency);

    // The prompt of a call that has left becomes a prefix holder; takes over the references of `path`.
    void add_context(ContextId context, Engine& engine, Path path);
    // Keeps only the boundaries within the first `length` tokens. Unknown contexts are ignored.
    void shorten_context(ContextId context, const Engine& engine, int64_t length);

    void release_path(std::span<const PathEntry> path);
    void grow(size_t num_slots) { residency_.grow(num_slots); }
    const Residency& residency() const { return residency_; }
    size_t num_contexts() const { return contexts_.size(); }
    size_t num_in_flight() const { return num_in_flight_; }

    // Throws std::logic_error unless engine counters equal what `calls` say.
    void check_invariants(const std::unordered_map<CallId, std::unique_ptr<Call>>& calls) const;

  private:
    struct Context {
        Engine* engine;
        Path path;
    };

    void forget_context(ContextId context);
    void check_engine(const Engine& engine, std::span<const Call* const> calls) const;

    PrefixTable& table_;
    Residency residency_;
    std::map<EngineId, std::unique_ptr<Engine>> by_id_;
    std::vector<Engine*> ordered_;
    std::vector<int32_t> free_slots_;
    int32_t num_slots_ = 0;
    size_t num_in_flight_ = 0;
    std::unordered_map<ContextId, Context> contexts_;
};

}  // namespace parrot::scheduler
