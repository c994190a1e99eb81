// Which engine holds which prefix, through calls in flight and through finished contexts.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/prefix_table.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// Tokens that an event made an engine hold, or let go, with a shared prefix counted once. `latency` is the
// part of it that latency-bound calls hold.
struct TokenCount {
    int64_t all = 0;
    int64_t latency = 0;
};

// One engine's holders of one PathEntry. Entries that end at one node but begin at different boundaries
// (prompts cut at different places) are kept apart, so that the sum over entries never falls below the tokens
// really held; it exceeds them only by the overlap of such entries.
struct Resident {
    int32_t engine_slot = 0;
    int32_t previous = 0;
    int32_t num_calls = 0;
    int32_t num_latency = 0;
    std::vector<ContextId> contexts;  // ascending

    bool empty() const { return num_calls == 0 && contexts.empty(); }
};

class Residency {
  public:
    // NodeIds below `num_slots` may be used from now on.
    void grow(size_t num_slots);

    TokenCount add_call(const Call& call, int32_t engine_slot);
    TokenCount remove_call(const Call& call, int32_t engine_slot);
    // A call in flight changes its objective; returns the tokens that become (or cease to be) latency-held.
    int64_t set_latency(const Call& call, int32_t engine_slot, bool latency);

    void add_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot);
    void remove_context(ContextId context, std::span<const PathEntry> path, int32_t engine_slot);

    // Ascending by (engine_slot, previous).
    std::span<const Resident> at(NodeId node) const { return residents_[node]; }

    // The longest prefix of `path` on an engine, and the newest context that has all of it.
    struct Location {
        int32_t prefix_len = 0;
        ContextId context = kNoContext;
    };
    Location locate(std::span<const PathEntry> path, int32_t engine_slot) const;

  private:
    Resident& obtain(const PathEntry& step, int32_t engine_slot);
    void drop_if_empty(const PathEntry& step, int32_t engine_slot);

    std::vector<std::vector<Resident>> residents_;  // by NodeId
};

}  // namespace parrot::scheduler
