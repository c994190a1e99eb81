// PrefixTree: how paths grow, shrink and are evicted.
#include <utility>

#include "kvcache/prefix_tree.h"
#include "mutants.h"

namespace parrot::kvcache {

std::int64_t PrefixTree::blocks_for(Node& node, std::int32_t count, std::int64_t batch_mark) const {
    const std::int32_t offset = node.end % block_size_;
    const std::int64_t num_spanned =
        (static_cast<std::int64_t>(offset) + count + block_size_ - 1) / block_size_;
    if (offset == 0) return num_spanned;
    // The first to write behind the last slot uses the block that is there, every other one a copy of it.
    const bool writes_on = !node.tail_taken && node.batch_mark != batch_mark;
    node.batch_mark = batch_mark;
    return writes_on ? num_spanned - 1 : num_spanned;
}

// A context's path after append, blocks of four:
//   | s  s  s  s | s  s  o  o | o  o  .  . |
//   s shared: nodes of other paths too; stay while any of them is held, then evict frees them
//   o own committed: the context's node; stay while it is held, then evict frees them, last block first
//   . reserved: the same node's [committed, end); cut frees them at once, commit makes them own
void PrefixTree::append(Context& context, std::span<const std::int32_t> tokens, std::int32_t* slots,
                        std::vector<BlockCopy>& copies) {
    const bool in_place =
        context.node->is_sole_tip() && context.node->domain == context.domains.at(context.node->end);
    Node& tip = in_place ? *context.node : add_tip(context, tokens.front(), copies);
    tip.tokens.insert(tip.tokens.end(), tokens.begin(), tokens.end());
    const std::int32_t first = tip.start / block_size_;
    const std::int32_t end = tip.end + static_cast<std::int32_t>(tokens.size());
    for (; tip.end < end; ++tip.end, ++slots) {
        const auto index = static_cast<std::size_t>(tip.end / block_size_ - first);
        if (index == tip.blocks.size()) add_block(tip);
        *slots = tip.blocks[index] * block_size_ + tip.end % block_size_;
    }
}

void PrefixTree::commit(Context& context) { context.node->committed = context.node->end; }

void PrefixTree::set_last_token(Context& context, std::int32_t token) {
    Node& tip = *context.node;
    if (tip.tokens.size() > 1) {
        tip.tokens.back() = token;
        return;
    }
    // Its parent knows it by this token.
    Node& parent = *tip.parent;
    unlink_child(tip);
    tip.tokens.front() = token;
    link_child(parent, tip, token);
}

void PrefixTree::cut(Context& context, std::int32_t length) {
    while (context.node->end > length) {
        Node& node = *context.node;
        if (!node.is_sole_tip()) return move(context, node_ending_at(node, length));
        if (node.start < length) return shrink(node, length);
        move(context, *node.parent);
        remove_leaf(node);
    }
}

void PrefixTree::evict(std::int32_t num_blocks) {
    lapse_uses();
    while (num_blocks > 0 && !eviction_queue_.empty()) {
        Node& leaf = nodes_[static_cast<std::size_t>(eviction_queue_.begin()->node_id)];
        num_blocks -= evict_from(leaf, num_blocks);
    }
}

void PrefixTree::evict_all() {
    while (!eviction_queue_.empty()) {
        Node& leaf = nodes_[static_cast<std::size_t>(eviction_queue_.begin()->node_id)];
        evict_from(leaf, leaf.num_own_blocks());
    }
}

/// Takes up to ``num_blocks`` from the end of a leaf; returns how many came free.
std::int32_t PrefixTree::evict_from(Node& leaf, std::int32_t num_blocks) {
    for (Context* context = leaf.first_context; context != nullptr; context = context->next) {
        if (!std::exchange(context->lost_tokens, true)) evicted_context_ids_.push_back(context->id);
    }
    const std::int32_t num_own = leaf.num_own_blocks();
    const std::int32_t num_freed = std::min(num_own, num_blocks);
    num_evicted_blocks_ += num_freed;
    if (num_freed < num_own) {
        const auto num_kept = static_cast<std::int32_t>(leaf.blocks.size()) - num_freed;
        shrink(leaf, (leaf.start / block_size_ + num_kept) * block_size_);
    } else {
        remove_leaf(leaf);
    }
    return num_freed;
}

std::vector<std::int64_t> PrefixTree::take_evicted_ids() { return std::exchange(evicted_context_ids_, {}); }

/// A new node below the end of the context's path, which no other context shares. Ends where it starts.
Node& PrefixTree::add_tip(Context& context, std::int32_t first_token, std::vector<BlockCopy>& copies) {
    Node& parent = *context.node;
    Node& tip = make_node();
    tip.start = tip.committed = tip.end = parent.end;
    tip.domain = context.domains.at(parent.end);
    link_child(parent, tip, first_token);
    move(context, tip);
    const std::int32_t offset = parent.end % block_size_;
    if (offset == 0) return tip;
    if (!std::exchange(parent.tail_taken, true) || mutant("cow_skipped")) {
        tip.shares_first_block = true;
        tip.blocks.push_back(parent.blocks.back());
        pool_.retain(parent.blocks.back());
    } else {
        add_block(tip);
        copies.push_back({parent.blocks.back(), tip.blocks.back(), offset});
    }
    return tip;
}

void PrefixTree::add_block(Node& node) {
    node.blocks.push_back(pool_.allocate());
    if (node.num_pins > 0) ++num_held_blocks_;
}

/// Gives up the end of a leaf; ``end`` is behind its start.
void PrefixTree::shrink(Node& node, std::int32_t end) {
    const auto num_kept = static_cast<std::size_t>(ceil_blocks(end) - node.start / block_size_);
    if (node.num_pins > 0) num_held_blocks_ -= static_cast<std::int32_t>(node.blocks.size() - num_kept);
    for (; node.blocks.size() > num_kept; node.blocks.pop_back()) pool_.release(node.blocks.back());
    node.tokens.resize(static_cast<std::size_t>(end - node.start));
    node.committed = std::min(node.committed, end);
    node.end = end;
}

/// Removes a leaf without pins; contexts and uses that end there now end at its parent.
void PrefixTree::remove_leaf(Node& node) {
    Node& parent = *node.parent;
    while (node.first_context != nullptr) {
        Context& context = *node.first_context;
        const bool used = context.use_node == &node;
        if (used) remove_use(context);
        unlink_context(context);
        link_context(context, parent);
        if (used && !parent.is_root()) add_use(context, parent);
    }
    if (node.queued) eviction_queue_.erase(node.eviction_key);
    for (const std::int32_t block : node.blocks) pool_.release(block);
    if (node.shares_first_block) parent.tail_taken = false;
    unlink_child(node);
    recycle(node);
    refresh_queue(parent);
    drop_root_if_empty(parent);
}

}  // namespace parrot::kvcache
