// Which engine holds which prefix, through calls in flight and through finished contexts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/flat_map.h"
#include "scheduler/slab.h"
#include "scheduler/types.h"

namespace parrot::scheduler {

// Tokens that an event made an engine hold, or let go, with a shared prefix counted once. `latency` is the
// part of it that latency-bound calls hold.
struct TokenCount {
    int64_t all = 0;
    int64_t latency = 0;
};

// The contexts that have a prefix on one engine; mostly one.
class ContextSet {
  public:
    void insert(ContextId context);
    void erase(ContextId context);
    ContextId newest() const { return newest_; }
    bool empty() const { return newest_ == kNoContext; }

  private:
    ContextId newest_ = kNoContext;
    std::vector<ContextId> older_;  // ascending
};

// One engine's holders of one PathEntry. Entries that end at one node but begin at different boundaries
// (prompts cut at different places) are kept apart, so that the sum over entries never falls below the tokens
// really held; it exceeds them only by the overlap of such entries.
struct Resident {
    NodeId node = kNoNode;
    int32_t engine_slot = 0;
    int32_t previous = 0;
    int32_t num_calls = 0;
    int32_t num_latency = 0;
    uint32_t next = kNoSlot;  // of the same node and engine, begun at another boundary
    uint32_t position = 0;    // in the node's list of engines; of the first of those
    ContextSet contexts;

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

    // What the engine has of a node, one for each boundary before it; null if nothing.
    const Resident* first(NodeId node, int32_t engine_slot) const;
    const Resident* next(const Resident& resident) const {
        return resident.next == kNoSlot ? nullptr : &residents_[resident.next];
    }
    // Slots of the engines that have a node, in no order of meaning.
    std::span<const int32_t> engines_of(NodeId node) const;

    // The longest prefix of `path` that any engine has.
    int32_t longest(std::span<const PathEntry> path) const;

    // The longest prefix of `path` on an engine, and the newest context that has all of it.
    struct Location {
        int32_t prefix_len = 0;
        ContextId context = kNoContext;
    };
    Location locate(std::span<const PathEntry> path, int32_t engine_slot) const;

  private:
    // The engines of a node: one of them in place, more in a list.
    struct Holders {
        uint32_t count = 0;
        int32_t only = 0;
        uint32_t list = kNoSlot;
    };

    static uint64_t key(NodeId node, int32_t engine_slot) {
        return uint64_t{node} << 32 | static_cast<uint32_t>(engine_slot);
    }
    Resident& obtain(const PathEntry& step, int32_t engine_slot);
    // Null when the engine has nothing of it.
    Resident* find(const PathEntry& step, int32_t engine_slot);
    Resident& at(const PathEntry& step, int32_t engine_slot);
    void drop_if_empty(Resident& resident);
    uint32_t add_holder(NodeId node, int32_t engine_slot);
    void remove_holder(NodeId node, uint32_t position);

    Slab<Resident> residents_;
    FlatMap<uint64_t, uint32_t> by_key_;  // the first of a node and an engine
    std::vector<Holders> holders_;        // by NodeId
    Slab<std::vector<int32_t>> lists_;
};

}  // namespace parrot::scheduler
