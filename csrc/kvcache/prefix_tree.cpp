#include "kvcache/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace parrot::kvcache {

namespace {

std::int32_t common_prefix(const std::int32_t* left, const std::int32_t* right, std::int32_t length) {
    // memcmp runs at memory speed; only the chunk that differs is looked at token by token.
    constexpr std::int32_t kChunk = 64;
    std::int32_t same = 0;
    while (length - same >= kChunk && std::memcmp(left + same, right + same, kChunk * sizeof(*left)) == 0) {
        same += kChunk;
    }
    while (same < length && left[same] == right[same]) ++same;
    return same;
}

}  // namespace

PrefixTree::PrefixTree(std::int32_t num_blocks, std::int32_t block_size)
    : block_size_(block_size), pool_(num_blocks) {}

Node& PrefixTree::root(std::int64_t domain) {
    Node*& root = roots_[domain];
    if (root == nullptr) {
        root = &make_node();
        root->domain = domain;
    }
    return *root;
}

Match PrefixTree::match(const Domains& domains, std::span<const std::int32_t> tokens,
                        bool committed_only) const {
    const auto found = roots_.find(domains.at(0));
    if (found == roots_.end()) return {};
    const auto length = static_cast<std::int32_t>(tokens.size());
    Match best{found->second, 0};
    std::vector<const Node*> matched{found->second};  // nodes whose whole range matches
    while (!matched.empty()) {
        const Node& node = *matched.back();
        matched.pop_back();
        if (node.end == length) continue;
        const std::int64_t domain = domains.at(node.end);
        const std::int32_t limit = std::min(length, domains.range_end(node.end)) - node.end;
        Node* child = first_child(node, domain, tokens[static_cast<std::size_t>(node.end)]);
        for (; child != nullptr; child = child->next_twin) {
            if (child->domain != domain) continue;
            const std::int32_t usable = (committed_only ? child->committed : child->end) - child->start;
            const std::int32_t same =
                common_prefix(child->tokens.data(), tokens.data() + node.end, std::min(usable, limit));
            const std::int32_t reached = node.end + same;
            // Of two equally long ones, the one that is held anyway takes no more blocks out of the cache.
            const bool costs_less = child->num_pins > 0 && best.node->num_pins == 0;
            if (reached > best.length || (reached == best.length && same > 0 && costs_less)) {
                best = {child, reached};
            }
            if (child->start + same == child->end) matched.push_back(child);
        }
    }
    return best;
}

Node& PrefixTree::node_ending_at(Node& below, std::int32_t length) {
    Node* node = &below;
    while (node->start >= length && !node->is_root()) node = node->parent;
    return node->end > length ? split(*node, length) : *node;
}

void PrefixTree::write_block_table(const Node& tip, std::span<std::int32_t> row) const {
    // From the tip upwards: the copy that a node made replaces the block of its parent.
    std::int32_t written_from = num_table_blocks(tip);
    std::fill(row.begin() + written_from, row.end(), -1);
    for (const Node* node = &tip; !node->is_root(); node = node->parent) {
        const std::int32_t first = node->start / block_size_;
        if (first >= written_from) continue;
        std::copy_n(node->blocks.begin(), written_from - first, row.begin() + first);
        written_from = first;
    }
}

std::vector<std::int32_t> PrefixTree::committed_tokens(const Node& tip) const {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(tip.committed));
    for (const Node* node = &tip; !node->is_root(); node = node->parent) {
        std::copy_n(node->tokens.begin(), node->committed - node->start, tokens.begin() + node->start);
    }
    return tokens;
}

Node* PrefixTree::first_child(const Node& parent, std::int64_t domain, std::int32_t first_token) const {
    const auto found = children_.find(child_key(parent, domain, first_token));
    return found == children_.end() ? nullptr : found->second;
}

Node& PrefixTree::make_node() {
    if (unused_node_ids_.empty()) {
        unused_node_ids_.push_back(static_cast<std::int32_t>(nodes_.size()));
        nodes_.emplace_back();
    }
    const std::int32_t id = unused_node_ids_.back();
    unused_node_ids_.pop_back();
    Node& node = nodes_[static_cast<std::size_t>(id)];
    node.id = id;
    node.live = true;
    return node;
}

void PrefixTree::recycle(Node& node) {
    const std::int32_t id = node.id;
    node = Node{};
    unused_node_ids_.push_back(id);
}

void PrefixTree::link_child(Node& parent, Node& child, std::int32_t first_token) {
    Node*& first = children_[child_key(parent, child.domain, first_token)];
    child.parent = &parent;
    child.next_twin = std::exchange(first, &child);
    if (child.next_twin != nullptr) child.next_twin->previous_twin = &child;
    ++parent.num_children;
}

void PrefixTree::unlink_child(Node& child) {
    Node* const next = std::exchange(child.next_twin, nullptr);
    Node* const previous = std::exchange(child.previous_twin, nullptr);
    if (next != nullptr) next->previous_twin = previous;
    if (previous != nullptr) {
        previous->next_twin = next;
    } else {
        const auto found = children_.find(child_key(*child.parent, child.domain, child.tokens.front()));
        found->second = next;
        if (next == nullptr) children_.erase(found);
    }
    --child.parent->num_children;
}

void PrefixTree::drop_root_if_empty(Node& node) {
    if (!node.is_root() || node.num_children > 0 || node.num_contexts > 0) return;
    roots_.erase(node.domain);
    recycle(node);
}

// Cuts a node in two at a committed position. The lower part stays the same node, so that the contexts and
// children at its end need no change. The caller lets a held context end at the upper part.
Node& PrefixTree::split(Node& lower, std::int32_t position) {
    Node& parent = *lower.parent;
    const std::int32_t num_upper = position - lower.start;
    const bool inside_block = position % block_size_ != 0;
    const std::int32_t first = lower.start / block_size_;

    Node& upper = make_node();
    upper.start = lower.start;
    upper.committed = upper.end = position;
    upper.domain = lower.domain;
    upper.tokens.assign(lower.tokens.begin(), lower.tokens.begin() + num_upper);
    upper.blocks.assign(lower.blocks.begin(), lower.blocks.begin() + (ceil_blocks(position) - first));
    upper.shares_first_block = lower.shares_first_block;
    upper.tail_taken = inside_block;
    upper.num_pins = lower.num_pins > 0 ? 1 : 0;
    upper.last_use = lower.last_use;

    unlink_child(lower);
    link_child(parent, upper, upper.tokens.front());
    lower.start = position;
    lower.tokens.erase(lower.tokens.begin(), lower.tokens.begin() + num_upper);
    lower.blocks.erase(lower.blocks.begin(), lower.blocks.begin() + (position / block_size_ - first));
    lower.shares_first_block = inside_block;
    if (inside_block) pool_.retain(lower.blocks.front());
    link_child(upper, lower, lower.tokens.front());
    return upper;
}

}  // namespace parrot::kvcache
