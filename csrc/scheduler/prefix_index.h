// Who has which token prefix (paper section 5.3): PrefixTable with a list of owners at every node.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "scheduler/chunked.h"
#include "scheduler/linear_hash.h"
#include "scheduler/prefix_table.h"

namespace parrot::scheduler {

// A queued call, whose prompt may have variables without a value, or an engine's context. The two kinds have
// ids of their own.
enum class OwnerKind { kCall, kContext };

using OwnerId = int64_t;

// Owners that share a prefix, the nearest first, and among equals the newest. Those of row i, which share its
// boundary and no longer one, lie in `calls` and `contexts` before its ends and from those of row i - 1.
struct PrefixMatches {
    struct Row {
        int32_t boundary;
        size_t calls_end;
        size_t contexts_end;
    };
    std::vector<Row> rows;  // the longest boundary first
    std::vector<OwnerId> calls;
    std::vector<OwnerId> contexts;
};

class PrefixIndex {
  public:
    PrefixIndex(const HashKey& key, bool constant_hash) : table_(key, constant_hash) {
        table_.set_labelled(registrations_);
    }

    // Throws std::invalid_argument for an owner that is there already, a context with variables, and bad
    // ids or boundaries.
    void insert(OwnerKind kind, OwnerId id, const PrefixScope& scope, const PromptView& prompt,
                std::span<const int32_t> boundaries);

    // Throw UnknownId for an owner that is not there.
    void remove(OwnerKind kind, OwnerId id);
    void shorten_context(OwnerId id, int64_t length);

    // The variable has got its text: the calls that waited for it are found by content from now on. Returns
    // how many they are.
    size_t set_variable(VariableId variable, std::span<const int32_t> token_ids);

    // Every owner once, and at most `max_owners` of a kind. Valid until the next match.
    const PrefixMatches& match(const PrefixScope& scope, const PromptView& prompt,
                               std::span<const int32_t> boundaries, size_t max_owners) const;

    // Number of distinct prefixes with an owner.
    size_t size() const { return num_prefixes_; }
    int64_t num_collisions() const { return table_.num_collisions(); }
    // Of the table and the owners, without what the allocator adds.
    size_t num_bytes() const;
    void check_invariants() const;

  private:
    using OwnerKey = int64_t;    // 2 * id, + 1 for a context
    using OwnerSlot = uint32_t;  // in owners_
    using RegistrationId = uint32_t;
    static constexpr uint32_t kNone = LinearHash::kNone;

    struct Owner {
        OwnerKey key = 0;
        RegistrationId longest = kNone;
        bool waits = false;  // for a variable before its longest boundary
    };

    // An owner at a node. The label of a node is the first of its list: calls, the newest first, then
    // contexts, the newest last. Only `previous` goes round in a circle, so that both ends are at hand.
    struct Registration {
        OwnerKey owner = 0;
        NodeId node = kNoNode;
        RegistrationId next = kNone;
        RegistrationId previous = kNone;
        RegistrationId shorter = kNone;  // the owner's, at the boundary before
        int32_t length = 0;
    };

    static OwnerKey key_of(OwnerKind kind, OwnerId id) { return 2 * id + (kind == OwnerKind::kContext); }
    static bool is_context(OwnerKey key) { return key % 2 == 1; }
    static uint32_t hash_of(OwnerKey key);

    OwnerSlot find_owner(OwnerKey key) const;
    OwnerSlot require_owner(OwnerKind kind, OwnerId id) const;
    void register_at(Owner& owner, std::span<const PathEntry> path);
    void attach(RegistrationId id);
    void detach(RegistrationId id);
    RegistrationId drop(RegistrationId id);
    void wait_for_variables(OwnerSlot slot, const PromptView& prompt, size_t length);
    void stop_waiting(OwnerSlot slot);
    void rekey(OwnerSlot slot, VariableId variable, std::span<const int32_t> token_ids);
    void list_owners(RegistrationId first, size_t max_owners, PrefixMatches& matches) const;
    void check_list(RegistrationId first) const;

    PrefixTable table_;
    Pool<Registration> registrations_;
    Pool<Owner> owners_;
    LinearHash by_key_;
    std::set<std::pair<VariableId, OwnerSlot>> waiting_;
    size_t num_prefixes_ = 0;
    mutable std::vector<NodeId> nodes_;  // of the prompt that was matched last, and its answer
    mutable PrefixMatches matches_;
};

}  // namespace parrot::scheduler
