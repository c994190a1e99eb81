// What the prefix index is measured against: a radix tree over token ids that answers the same question.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "scheduler/chunked.h"

namespace parrot::bench {

// Edges are runs of tokens, compared token by token; all children of all nodes are in one open-addressing
// hash table by (node, first token of the edge). Owners are kept at the nodes of their boundaries, the newest
// first.
class RadixTree {
  public:
    using OwnerId = int64_t;

    RadixTree();
    RadixTree(const RadixTree&) = delete;
    RadixTree& operator=(const RadixTree&) = delete;
    ~RadixTree();

    void insert(OwnerId owner, std::span<const int32_t> token_ids, std::span<const int32_t> boundaries);
    void remove(OwnerId owner);

    // The longest boundary of anyone that `token_ids` begins with, and its newest owner; (0, 0) for none.
    std::pair<int32_t, OwnerId> find(std::span<const int32_t> token_ids) const;

    size_t num_nodes() const { return nodes_.size(); }

  private:
    using NodeId = uint32_t;
    using MemberId = uint32_t;
    static constexpr uint32_t kNone = ~uint32_t{0};

    struct Node {
        NodeId parent = kNone;
        NodeId first_child = kNone;
        NodeId next_sibling = kNone;
        NodeId previous_sibling = kNone;
        MemberId first_member = kNone;
        uint32_t edge_length = 0;
        int32_t* edge = nullptr;
    };

    struct alignas(32) Member {
        OwnerId owner = 0;
        NodeId node = kNone;
        MemberId next = kNone;
        MemberId previous = kNone;
    };

    // Open addressing with linear probing; a removal shifts what follows back.
    class Children {
      public:
        NodeId find(NodeId parent, int32_t token) const;
        void set(NodeId parent, int32_t token, NodeId child);
        void erase(NodeId parent, int32_t token);

      private:
        struct Entry {
            NodeId parent = kNone;
            int32_t token = 0;
            NodeId child = kNone;
        };
        size_t home_of(NodeId parent, int32_t token) const;
        size_t position(NodeId parent, int32_t token) const;
        void grow();

        std::vector<Entry> entries_ = std::vector<Entry>(16);
        size_t size_ = 0;
    };

    std::span<const int32_t> edge_of(NodeId id) const { return {nodes_[id].edge, nodes_[id].edge_length}; }
    void set_edge(NodeId id, std::span<const int32_t> tokens);
    NodeId descend(NodeId from, std::span<const int32_t> tokens);
    NodeId add_child(NodeId parent, std::span<const int32_t> edge);
    NodeId split(NodeId node, uint32_t length);
    void link(NodeId node, NodeId parent);
    void unlink(NodeId node);
    void tidy(NodeId node);

    scheduler::Pool<Node> nodes_;
    scheduler::Pool<Member> members_;
    Children children_;
    std::unordered_map<OwnerId, std::vector<MemberId>> owners_;
    NodeId root_;
};

}  // namespace parrot::bench
