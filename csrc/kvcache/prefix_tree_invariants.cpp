// PrefixTree: what must hold between any two calls, computed anew from the nodes.
#include <stdexcept>
#include <vector>

#include "kvcache/errors.h"
#include "kvcache/prefix_tree.h"

namespace parrot::kvcache {

namespace {

template <class... Parts>
void ensure(bool condition, const Parts&... parts) {
    if (!condition) throw std::runtime_error(concat("KV cache invariant broken: ", parts...));
}

}  // namespace

void PrefixTree::check_invariants(std::size_t num_contexts) const {
    const std::vector<Tally> tallies = tally_children();
    std::size_t num_attached = 0;
    std::size_t num_live = 0;
    std::size_t num_roots = 0;
    std::size_t num_uses = 0;
    for (const Node& node : nodes_) {
        if (!node.live) continue;
        ++num_live;
        num_attached += static_cast<std::size_t>(node.num_contexts);
        if (node.is_root()) {
            ++num_roots;
            const auto found = roots_.find(node.domain);
            ensure(found != roots_.end() && found->second == &node, "root ", node.id, " is not registered");
            ensure(node.end == 0 && node.blocks.empty(), "root ", node.id, " is not empty");
        } else {
            check_range(node);
        }
        check_domains(node);
        check_counts(node, tallies[static_cast<std::size_t>(node.id)]);
        check_uses(node, tallies[static_cast<std::size_t>(node.id)]);
        num_uses += static_cast<std::size_t>(node.num_uses);
    }
    ensure(num_attached == num_contexts, num_contexts, " contexts, but ", num_attached, " at nodes");
    ensure(num_roots == roots_.size(), num_roots, " live roots, ", roots_.size(), " registered");
    ensure(num_live + unused_node_ids_.size() == nodes_.size(), "live and unused nodes are not all nodes");
    ensure(uses_.size() == num_uses && lapses_.size() == num_uses, num_uses, " uses at nodes, but ",
           uses_.size(), " in order and ", lapses_.size(), " to lapse");
    check_links(num_live - num_roots);
    check_queue();
    check_blocks();
}

std::vector<PrefixTree::Tally> PrefixTree::tally_children() const {
    std::vector<Tally> tallies(nodes_.size());
    for (const Node& node : nodes_) {
        for (const Context* context = node.first_context; context != nullptr; context = context->next) {
            if (context->use_node != nullptr)
                ++tallies[static_cast<std::size_t>(context->use_node->id)].num_uses;
        }
        if (!node.live || node.is_root()) continue;
        Tally& tally = tallies[static_cast<std::size_t>(node.parent->id)];
        ++tally.num_children;
        tally.num_pins += node.num_pins > 0 ? 1 : 0;
        tally.num_tail_writers += node.shares_first_block ? 1 : 0;
    }
    return tallies;
}

void PrefixTree::check_range(const Node& node) const {
    const auto size = static_cast<std::size_t>(node.end - node.start);
    const Node& parent = *node.parent;
    ensure(node.start < node.end, "node ", node.id, " has the range [", node.start, ", ", node.end, ")");
    ensure(parent.live && (parent.domain == node.domain || parent.domain == kPublicDomain), "node ", node.id,
           " of domain ", node.domain, " has a parent of domain ", parent.domain);
    ensure(parent.end == node.start, "node ", node.id, " starts at ", node.start, ", parent ends at ",
           parent.end);
    ensure(parent.committed == parent.end, "node ", parent.id, " has children below reserved tokens");
    ensure(node.start <= node.committed && node.committed <= node.end, "node ", node.id, " committed ",
           node.committed);
    ensure(node.committed == node.end || (node.is_sole_tip() && node.first_context->held), "node ", node.id,
           " is reserved by more or less than one held context");
    ensure(node.tokens.size() == size, "node ", node.id, " has ", node.tokens.size(), " tokens for ", size);
    ensure(node.blocks.size() == static_cast<std::size_t>(ceil_blocks(node.end) - node.start / block_size_),
           "node ", node.id, " has ", node.blocks.size(), " blocks for [", node.start, ", ", node.end, ")");
    const bool same_block = !parent.blocks.empty() && node.blocks.front() == parent.blocks.back();
    ensure(node.shares_first_block == same_block, "node ", node.id,
           " and its parent: shared block flag is off");
    ensure(!same_block || (node.start % block_size_ != 0 && parent.tail_taken), "node ", node.id,
           " shares a block that its parent fills or has not given away");
}

/// The path of a context changes its domain once, where the context says.
void PrefixTree::check_domains(const Node& node) const {
    for (const Context* context = node.first_context; context != nullptr; context = context->next) {
        const auto& [domain, public_len] = context->domains;
        const Node* above = &node;
        while (!above->is_root() && above->domain != kPublicDomain) above = above->parent;
        const bool is_public = node.domain == kPublicDomain;
        const std::int32_t seam = above->end;
        ensure(is_public || node.domain == domain, "context ", context->id, " of domain ", domain,
               " is at node ", node.id, " of domain ", node.domain);
        ensure(domain == kPublicDomain || (is_public ? seam <= public_len : seam == public_len), "context ",
               context->id, " has ", public_len, " published tokens, its path ", seam);
    }
}

/// Each of ``num_nodes`` is found from its parent: every list once, since there may be long ones.
void PrefixTree::check_links(std::size_t num_nodes) const {
    std::size_t num_linked = 0;
    for (const auto& [key, first] : children_) {
        const Node* previous = nullptr;
        for (const Node* node = first; node != nullptr; previous = node, node = node->next_twin) {
            ensure(++num_linked <= num_nodes, "more than ", num_nodes, " nodes are listed as children");
            ensure(node->live && !node->is_root(), "node ", node->id, " is listed as a child");
            ensure(child_key(*node->parent, node->domain, node->tokens.front()) == key, "node ", node->id,
                   " cannot be found from its parent ", node->parent->id);
            ensure(node->previous_twin == previous, "node ", node->id, " is listed behind another twin");
        }
    }
    ensure(num_linked == num_nodes, num_nodes, " nodes have parents, ", num_linked,
           " are listed as children");
}

void PrefixTree::check_counts(const Node& node, Tally tally) const {
    std::int32_t num_contexts = 0;
    for (const Context* context = node.first_context; context != nullptr; context = context->next) {
        ensure(context->node == &node, "context ", context->id, " is listed at node ", node.id);
        ++num_contexts;
        tally.num_pins += context->held ? 1 : 0;
    }
    ensure(num_contexts == node.num_contexts, "node ", node.id, " counts ", node.num_contexts, " contexts");
    ensure(tally.num_children == node.num_children, "node ", node.id, " counts ", node.num_children,
           " children");
    ensure(tally.num_pins == node.num_pins, "node ", node.id, " counts ", node.num_pins, " pins, has ",
           tally.num_pins);
    ensure(tally.num_tail_writers == (node.tail_taken ? 1 : 0), "node ", node.id, " has ",
           tally.num_tail_writers, " children in its last block");
}

void PrefixTree::check_uses(const Node& node, const Tally& tally) const {
    std::int32_t num_unhinted = 0;
    for (const Context* context = node.first_context; context != nullptr; context = context->next) {
        num_unhinted += context->hinted ? 0 : 1;
        if (context->use_node == nullptr) continue;
        const Node* above = &node;
        while (above != nullptr && above != context->use_node) above = above->parent;
        ensure(above != nullptr && !above->is_root(), "context ", context->id, " is used off its path");
        ensure(context->hinted && !context->held, "context ", context->id, " is held, but has a use");
        ensure(uses_.contains({above->id, context->steps, context->id}), "the use of context ", context->id,
               " is not in order");
    }
    ensure(num_unhinted == node.num_unhinted, "node ", node.id, " counts ", node.num_unhinted,
           " contexts without hints, has ", num_unhinted);
    ensure(tally.num_uses == node.num_uses, "node ", node.id, " counts ", node.num_uses, " uses, has ",
           tally.num_uses);
}

void PrefixTree::check_queue() const {
    std::size_t num_evictable = 0;
    for (const Node& node : nodes_) {
        const bool evictable = node.live && !node.is_root() && node.num_children == 0 && node.num_pins == 0;
        ensure(node.queued == evictable, "node ", node.id, evictable ? " is missing from" : " is in",
               " the eviction queue");
        if (!evictable) continue;
        ++num_evictable;
        const EvictionKey key = eviction_key(node);
        ensure(node.eviction_key == key && eviction_queue_.contains(key), "node ", node.id,
               " has a stale place in the queue");
    }
    ensure(num_evictable == eviction_queue_.size(), eviction_queue_.size(), " queued, ", num_evictable,
           " evictable");
}

void PrefixTree::check_blocks() const {
    const auto num_blocks = static_cast<std::size_t>(pool_.num_blocks());
    std::vector<std::int32_t> num_references(num_blocks, 0);
    std::vector<bool> held(num_blocks, false);
    for (const Node& node : nodes_) {
        for (const std::int32_t block : node.blocks) {
            ensure(block >= 0 && block < pool_.num_blocks(), "node ", node.id, " refers to block ", block);
            ++num_references[static_cast<std::size_t>(block)];
            if (node.num_pins > 0) held[static_cast<std::size_t>(block)] = true;
        }
    }
    std::vector<bool> listed(num_blocks, false);
    for (const std::int32_t block : pool_.free_blocks()) {
        ensure(!listed[static_cast<std::size_t>(block)], "block ", block, " is free twice");
        listed[static_cast<std::size_t>(block)] = true;
    }
    std::int32_t num_held = 0;
    for (std::size_t block = 0; block < num_blocks; ++block) {
        ensure(num_references[block] == pool_.num_references()[block], "block ", block, " counts ",
               pool_.num_references()[block], " references, has ", num_references[block]);
        ensure(listed[block] == (num_references[block] == 0), "block ", block,
               " is free and in use, or neither");
        num_held += held[block] ? 1 : 0;
    }
    ensure(num_held == num_held_blocks_, num_held_blocks_, " blocks counted as held, ", num_held, " are");
    ensure(num_free_blocks() + num_evictable_blocks() + num_held_blocks() == pool_.num_blocks(), "free ",
           num_free_blocks(), " + evictable ", num_evictable_blocks(), " + held ", num_held_blocks(),
           " != ", pool_.num_blocks());
}

}  // namespace parrot::kvcache
