#include "scheduler/prefix_table.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace parrot::scheduler {

PrefixTable::PrefixTable(const HashKey& key, bool constant_hash) : key_(key), constant_hash_(constant_hash) {}

Path PrefixTable::acquire(const PrefixScope& scope, std::span<const int32_t> token_ids,
                          std::span<const int32_t> boundaries) {
    Path path;
    path.reserve(boundaries.size());
    PrefixHasher hasher(key_, scope);
    int32_t previous = 0;
    NodeId deepest = kNoNode;
    for (const int32_t boundary : boundaries) {
        const auto prefix = token_ids.first(static_cast<size_t>(boundary));
        hasher.extend(prefix.subspan(static_cast<size_t>(previous)));
        const Hash128 hash = digest(hasher);
        NodeId node = find_node(hash, scope, prefix, deepest);
        if (node == kNoNode) node = create(hash, scope, prefix, deepest);
        ++nodes_[node].references;
        path.push_back({node, boundary, previous});
        previous = boundary;
        deepest = node;
    }
    return path;
}

std::vector<NodeId> PrefixTable::find(const PrefixScope& scope, std::span<const int32_t> token_ids,
                                      std::span<const int32_t> boundaries) const {
    std::vector<NodeId> found;
    found.reserve(boundaries.size());
    PrefixHasher hasher(key_, scope);
    int32_t previous = 0;
    NodeId deepest = kNoNode;
    for (const int32_t boundary : boundaries) {
        const auto prefix = token_ids.first(static_cast<size_t>(boundary));
        hasher.extend(prefix.subspan(static_cast<size_t>(previous)));
        const NodeId node = find_node(digest(hasher), scope, prefix, deepest);
        found.push_back(node);
        previous = boundary;
        if (node != kNoNode) deepest = node;
    }
    return found;
}

void PrefixTable::release(NodeId node) {
    while (node != kNoNode && --nodes_[node].references == 0) {
        const NodeId parent = nodes_[node].parent;
        unlink(node);
        nodes_[node] = Node{};
        free_.push_back(node);
        node = parent;
    }
}

Hash128 PrefixTable::digest(const PrefixHasher& hasher) const {
    return constant_hash_ ? Hash128{} : hasher.digest();
}

// `verified` is a node already known to hold a prefix of the same tokens, which need no second look.
NodeId PrefixTable::find_node(const Hash128& hash, const PrefixScope& scope, std::span<const int32_t> prefix,
                              NodeId verified) const {
    const auto first = first_by_hash_.find(hash);
    if (first == first_by_hash_.end()) return kNoNode;
    for (NodeId id = first->second; id != kNoNode; id = nodes_[id].next_same_hash) {
        const Node& node = nodes_[id];
        const bool same_shape = node.scope == scope && static_cast<size_t>(node.length) == prefix.size();
        if (same_shape && has_content(id, prefix, verified)) return id;
        ++num_collisions_;
    }
    return kNoNode;
}

bool PrefixTable::has_content(NodeId node, std::span<const int32_t> prefix, NodeId verified) const {
    while (node != kNoNode && node != verified) {
        const std::vector<int32_t>& segment = nodes_[node].segment;
        const NodeId parent = nodes_[node].parent;
        const auto own = prefix.subspan(static_cast<size_t>(length_of(parent)), segment.size());
        if (!std::equal(segment.begin(), segment.end(), own.begin())) return false;
        node = parent;
    }
    return true;
}

NodeId PrefixTable::create(const Hash128& hash, const PrefixScope& scope, std::span<const int32_t> prefix,
                           NodeId parent) {
    NodeId id = kNoNode;
    if (free_.empty()) {
        id = static_cast<NodeId>(nodes_.size());
        nodes_.emplace_back();
    } else {
        id = free_.back();
        free_.pop_back();
    }
    Node& node = nodes_[id];
    const auto segment = prefix.subspan(static_cast<size_t>(length_of(parent)));
    node.hash = hash;
    node.scope = scope;
    node.parent = parent;
    node.length = static_cast<int32_t>(prefix.size());
    node.segment.assign(segment.begin(), segment.end());
    if (parent != kNoNode) ++nodes_[parent].references;
    const auto [first, is_new] = first_by_hash_.try_emplace(hash, id);
    if (!is_new) {
        node.next_same_hash = first->second;
        first->second = id;
    }
    return id;
}

void PrefixTable::unlink(NodeId node) {
    const auto first = first_by_hash_.find(nodes_[node].hash);
    const NodeId next = nodes_[node].next_same_hash;
    if (first->second == node) {
        if (next == kNoNode) {
            first_by_hash_.erase(first);
        } else {
            first->second = next;
        }
        return;
    }
    NodeId before = first->second;
    while (nodes_[before].next_same_hash != node) before = nodes_[before].next_same_hash;
    nodes_[before].next_same_hash = next;
}

void PrefixTable::check_invariants() const {
    size_t linked = 0;
    for (const auto& [hash, first] : first_by_hash_) {
        for (NodeId id = first; id != kNoNode; id = nodes_[id].next_same_hash) {
            const Node& node = nodes_[id];
            const int64_t parent_len = length_of(node.parent);
            const bool sound = node.references > 0 && node.hash == hash &&
                               parent_len + static_cast<int64_t>(node.segment.size()) == node.length;
            if (!sound) throw std::logic_error("prefix node " + std::to_string(id) + " is corrupt");
            ++linked;
        }
    }
    if (linked != size()) {
        throw std::logic_error("prefix table links " + std::to_string(linked) + " nodes of " +
                               std::to_string(size()));
    }
}

}  // namespace parrot::scheduler
