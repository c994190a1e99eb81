// Interned token prefixes: one node for each distinct (scope, tokens[0, boundary)) that somebody refers to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <unordered_map>
#include <vector>

#include "scheduler/prefix_hash.h"

namespace parrot::scheduler {

using NodeId = uint32_t;
inline constexpr NodeId kNoNode = std::numeric_limits<NodeId>::max();

// One boundary of one prompt. `previous` is the boundary before it in that prompt (0 for the first), so that
// the entry stands for the tokens [previous, length).
struct PathEntry {
    NodeId node = kNoNode;
    int32_t length = 0;
    int32_t previous = 0;
};

using Path = std::vector<PathEntry>;

// A node owns the tokens after its parent's, so a prefix shared by many prompts is stored once. Nodes are
// found by hash and then compared by content: a collision costs time and never yields a wrong node.
//
//   tokens of a node:  [ parent's .............. | segment ]   parent may be kNoNode
//
// A node lives while references (one per path that holds it, one per child) remain, and no longer.
class PrefixTable {
  public:
    PrefixTable(const HashKey& key, bool constant_hash);

    // The node of every boundary, made where missing; takes one reference on each.
    Path acquire(const PrefixScope& scope, std::span<const int32_t> token_ids,
                 std::span<const int32_t> boundaries);

    // The node of every boundary, kNoNode where nobody has it.
    std::vector<NodeId> find(const PrefixScope& scope, std::span<const int32_t> token_ids,
                             std::span<const int32_t> boundaries) const;

    // Gives one reference back.
    void release(NodeId node);

    // Every NodeId is below this; ids of released nodes are used again.
    size_t num_slots() const { return nodes_.size(); }
    size_t size() const { return nodes_.size() - free_.size(); }
    // How often a look-up met another prefix of the same hash, which only the comparison told apart.
    int64_t num_collisions() const { return num_collisions_; }

    void check_invariants() const;

  private:
    struct Node {
        Hash128 hash;
        PrefixScope scope;
        NodeId parent = kNoNode;
        NodeId next_same_hash = kNoNode;
        int32_t length = 0;
        uint32_t references = 0;
        std::vector<int32_t> segment;
    };

    Hash128 digest(const PrefixHasher& hasher) const;
    NodeId find_node(const Hash128& hash, const PrefixScope& scope, std::span<const int32_t> prefix,
                     NodeId verified) const;
    bool has_content(NodeId node, std::span<const int32_t> prefix, NodeId verified) const;
    NodeId create(const Hash128& hash, const PrefixScope& scope, std::span<const int32_t> prefix,
                  NodeId parent);
    void unlink(NodeId node);
    int32_t length_of(NodeId node) const { return node == kNoNode ? 0 : nodes_[node].length; }

    HashKey key_;
    bool constant_hash_;
    std::vector<Node> nodes_;
    std::vector<NodeId> free_;
    mutable int64_t num_collisions_ = 0;
    std::unordered_map<Hash128, NodeId, Hash128Bucket> first_by_hash_;
};

}  // namespace parrot::scheduler
