#include "bench/radix_tree.h"

#include <algorithm>

namespace parrot::bench {

RadixTree::RadixTree() : root_(nodes_.allocate()) {}

RadixTree::~RadixTree() {
    for (NodeId id = 0; id < nodes_.num_slots(); ++id) {
        if (nodes_.contains(id)) delete[] nodes_[id].edge;
    }
}

void RadixTree::insert(OwnerId owner, std::span<const int32_t> token_ids,
                       std::span<const int32_t> boundaries) {
    NodeId node = root_;
    int32_t previous = 0;
    std::vector<MemberId>& memberships = owners_[owner];
    for (const int32_t boundary : boundaries) {
        node = descend(node,
                       token_ids.first(static_cast<size_t>(boundary)).subspan(static_cast<size_t>(previous)));
        previous = boundary;
        const MemberId id = members_.allocate();
        members_[id] = {owner, node, nodes_[node].first_member, kNone};
        if (members_[id].next != kNone) members_[members_[id].next].previous = id;
        nodes_[node].first_member = id;
        memberships.push_back(id);
    }
}

void RadixTree::remove(OwnerId owner) {
    const auto entry = owners_.find(owner);
    for (size_t i = entry->second.size(); i-- > 0;) {
        const MemberId id = entry->second[i];
        const Member gone = members_[id];
        members_.free(id);
        if (gone.next != kNone) members_[gone.next].previous = gone.previous;
        if (gone.previous != kNone) {
            members_[gone.previous].next = gone.next;
        } else {
            nodes_[gone.node].first_member = gone.next;
        }
        tidy(gone.node);
    }
    owners_.erase(entry);
}

std::pair<int32_t, RadixTree::OwnerId> RadixTree::find(std::span<const int32_t> token_ids) const {
    std::pair<int32_t, OwnerId> best{0, 0};
    size_t length = 0;
    for (NodeId node = root_; length < token_ids.size();) {
        node = children_.find(node, token_ids[length]);
        if (node == kNone) break;
        const auto edge = edge_of(node);
        const auto rest = token_ids.subspan(length);
        if (edge.size() > rest.size() || !std::equal(edge.begin(), edge.end(), rest.begin())) break;
        length += edge.size();
        if (nodes_[node].first_member != kNone) {
            best = {static_cast<int32_t>(length), members_[nodes_[node].first_member].owner};
        }
    }
    return best;
}

void RadixTree::set_edge(NodeId id, std::span<const int32_t> tokens) {
    int32_t* edge = new int32_t[tokens.size()];
    std::ranges::copy(tokens, edge);
    delete[] nodes_[id].edge;
    nodes_[id].edge = edge;
    nodes_[id].edge_length = static_cast<uint32_t>(tokens.size());
}

// The node that ends with `tokens` below `from`, made where it is missing.
RadixTree::NodeId RadixTree::descend(NodeId from, std::span<const int32_t> tokens) {
    while (!tokens.empty()) {
        const NodeId child = children_.find(from, tokens[0]);
        if (child == kNone) return add_child(from, tokens);
        const auto edge = edge_of(child);
        const auto differing = std::ranges::mismatch(edge, tokens).in1;
        const auto shared = static_cast<size_t>(differing - edge.begin());
        from = shared == edge.size() ? child : split(child, static_cast<uint32_t>(shared));
        tokens = tokens.subspan(shared);
    }
    return from;
}

RadixTree::NodeId RadixTree::add_child(NodeId parent, std::span<const int32_t> edge) {
    const NodeId id = nodes_.allocate();
    set_edge(id, edge);
    link(id, parent);
    return id;
}

// A new node takes over the first `length` tokens of the edge.
RadixTree::NodeId RadixTree::split(NodeId node, uint32_t length) {
    const NodeId upper = nodes_.allocate();
    const NodeId parent = nodes_[node].parent;
    unlink(node);
    const std::vector<int32_t> edge(nodes_[node].edge, nodes_[node].edge + nodes_[node].edge_length);
    set_edge(upper, std::span(edge).first(length));
    set_edge(node, std::span(edge).subspan(length));
    link(upper, parent);
    link(node, upper);
    return upper;
}

void RadixTree::link(NodeId id, NodeId parent) {
    Node& node = nodes_[id];
    node.parent = parent;
    node.previous_sibling = kNone;
    node.next_sibling = nodes_[parent].first_child;
    if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = id;
    nodes_[parent].first_child = id;
    children_.set(parent, node.edge[0], id);
}

void RadixTree::unlink(NodeId id) {
    const Node& node = nodes_[id];
    if (node.next_sibling != kNone) nodes_[node.next_sibling].previous_sibling = node.previous_sibling;
    if (node.previous_sibling != kNone) {
        nodes_[node.previous_sibling].next_sibling = node.next_sibling;
    } else {
        nodes_[node.parent].first_child = node.next_sibling;
    }
    children_.erase(node.parent, node.edge[0]);
}

// Removes a node that nobody needs any more, or joins it with its only child.
void RadixTree::tidy(NodeId id) {
    while (id != root_ && nodes_[id].first_member == kNone) {
        const NodeId child = nodes_[id].first_child;
        if (child != kNone && nodes_[child].next_sibling != kNone) return;
        const NodeId parent = nodes_[id].parent;
        unlink(id);
        if (child != kNone) {
            const auto upper = edge_of(id), lower = edge_of(child);
            std::vector<int32_t> edge(upper.begin(), upper.end());
            edge.insert(edge.end(), lower.begin(), lower.end());
            children_.erase(id, lower[0]);
            set_edge(child, edge);
            link(child, parent);
        }
        delete[] nodes_[id].edge;
        nodes_.free(id);
        id = parent;
    }
}

size_t RadixTree::Children::home_of(NodeId parent, int32_t token) const {
    const uint64_t key = uint64_t{parent} << 32 | static_cast<uint32_t>(token);
    const uint64_t mixed = (key ^ key >> 29) * 0xbf58476d1ce4e5b9ULL;
    return (mixed ^ mixed >> 32) & (entries_.size() - 1);
}

// Of the entry, or of the hole where it would be.
size_t RadixTree::Children::position(NodeId parent, int32_t token) const {
    size_t at = home_of(parent, token);
    while (entries_[at].child != kNone && (entries_[at].parent != parent || entries_[at].token != token)) {
        at = (at + 1) & (entries_.size() - 1);
    }
    return at;
}

RadixTree::NodeId RadixTree::Children::find(NodeId parent, int32_t token) const {
    return entries_[position(parent, token)].child;
}

void RadixTree::Children::set(NodeId parent, int32_t token, NodeId child) {
    if (++size_ * 4 > entries_.size() * 3) grow();
    entries_[position(parent, token)] = {parent, token, child};
}

void RadixTree::Children::erase(NodeId parent, int32_t token) {
    const size_t last = entries_.size() - 1;
    size_t hole = position(parent, token);
    --size_;
    for (size_t at = (hole + 1) & last; entries_[at].child != kNone; at = (at + 1) & last) {
        const size_t home = home_of(entries_[at].parent, entries_[at].token);
        if (((at - home) & last) < ((at - hole) & last)) continue;  // its home is behind the hole
        entries_[hole] = entries_[at];
        hole = at;
    }
    entries_[hole] = Entry{};
}

void RadixTree::Children::grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    for (const Entry& entry : old) {
        if (entry.child != kNone) entries_[position(entry.parent, entry.token)] = entry;
    }
}

}  // namespace parrot::bench
