// PrefixTree: which contexts end where, what they pin, and which leaves may be evicted.
#include "kvcache/prefix_tree.h"

namespace parrot::kvcache {

void PrefixTree::attach(Context& context, Node& node) {
    link_context(context, node);
    if (context.held) pin(&node);
    refresh_queue(node);
}

void PrefixTree::detach(Context& context) {
    Node& node = *context.node;
    forget_future(context);
    unlink_context(context);
    if (context.held) unpin(&node);
    refresh_queue(node);
    drop_root_if_empty(node);
}

void PrefixTree::move(Context& context, Node& node) {
    // The new pin comes first: the path that both have in common keeps its pins and its age.
    Node& from = *context.node;
    if (context.held) pin(&node);
    unlink_context(context);
    link_context(context, node);
    if (context.held) unpin(&from);
    refresh_queue(from);
    refresh_queue(node);
    drop_root_if_empty(from);
}

void PrefixTree::let_go(Context& context) {
    context.held = false;
    unpin(context.node);
}

void PrefixTree::link_context(Context& context, Node& node) {
    context.node = &node;
    context.previous = nullptr;
    context.next = node.first_context;
    if (context.next != nullptr) context.next->previous = &context;
    node.first_context = &context;
    ++node.num_contexts;
    if (!context.hinted) ++node.num_unhinted;
}

void PrefixTree::unlink_context(Context& context) {
    Context*& from_before =
        context.previous != nullptr ? context.previous->next : context.node->first_context;
    from_before = context.next;
    if (context.next != nullptr) context.next->previous = context.previous;
    --context.node->num_contexts;
    if (!context.hinted) --context.node->num_unhinted;
    context.previous = context.next = nullptr;
}

void PrefixTree::pin(Node* node) {
    for (; node != nullptr && node->num_pins++ == 0; node = node->parent) {
        num_held_blocks_ += node->num_own_blocks();
        refresh_queue(*node);
    }
}

void PrefixTree::unpin(Node* node) {
    ++tick_;
    for (; node != nullptr && --node->num_pins == 0; node = node->parent) {
        num_held_blocks_ -= node->num_own_blocks();
        node->last_use = tick_;
        refresh_queue(*node);
    }
}

/// Puts a node into the eviction queue, out of it, or to another place in it, as its state says.
void PrefixTree::refresh_queue(Node& node) {
    const bool evictable = node.num_pins == 0 && node.num_children == 0 && !node.is_root();
    const EvictionKey key = evictable ? eviction_key(node) : EvictionKey{};
    if (node.queued && (!evictable || node.eviction_key != key)) {
        eviction_queue_.erase(node.eviction_key);
        node.queued = false;
    }
    if (evictable && !node.queued) {
        eviction_queue_.insert(key);
        node.eviction_key = key;
        node.queued = true;
    }
}

}  // namespace parrot::kvcache
