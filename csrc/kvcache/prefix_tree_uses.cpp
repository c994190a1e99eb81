// PrefixTree: what is known of the future of cached contexts, and the order of eviction that follows from it.
#include <algorithm>

#include "kvcache/prefix_tree.h"
#include "mutants.h"

namespace parrot::kvcache {

/// Uses end at the nodes up to which they reach, and only leaves are evicted. So a leaf needs to look at its
/// own uses only: those of a path that ran on below it have come up to it with the end of that path.
EvictionKey PrefixTree::eviction_key(const Node& node) const {
    if (node.num_contexts == 0) return {Worth::kUnnamed, 0, node.last_use, node.id};
    if (node.num_unhinted == 0 && node.num_uses == 0) return {Worth::kUnused, 0, node.last_use, node.id};
    std::int32_t steps = kUnknownSteps;
    if (node.num_uses > 0 && !mutant("uses_ignored")) {
        const std::int32_t nearest = uses_.lower_bound({node.id, 0, 0})->steps;
        steps = node.num_unhinted > 0 ? std::min(nearest, kUnknownSteps) : nearest;
    }
    return {Worth::kUsed, -steps, node.last_use, node.id};
}

void PrefixTree::set_use(Context& context, std::int32_t length, std::int32_t remaining_uses,
                         std::int32_t steps) {
    forget_future(context);
    context.hinted = true;
    --context.node->num_unhinted;
    const std::int32_t reach = std::min(length, context.node->end);
    if (remaining_uses > 0 && reach > 0) {
        context.steps = steps;
        context.lapses_at = num_evicted_blocks_ + kLapsePools * pool_.num_blocks();
        add_use(context, node_ending_at(*context.node, reach));
    }
    refresh_queue(*context.node);
}

void PrefixTree::add_use(Context& context, Node& node) {
    context.use_node = &node;
    uses_.insert({node.id, context.steps, context.id});
    lapses_.insert({context.lapses_at, &context});
    ++node.num_uses;
    refresh_queue(node);
}

void PrefixTree::remove_use(Context& context) {
    Node& node = *context.use_node;
    context.use_node = nullptr;
    uses_.erase({node.id, context.steps, context.id});
    lapses_.erase({context.lapses_at, &context});
    --node.num_uses;
    refresh_queue(node);
}

void PrefixTree::forget_future(Context& context) {
    if (context.use_node != nullptr) remove_use(context);
    if (!context.hinted) return;
    context.hinted = false;
    ++context.node->num_unhinted;
    refresh_queue(*context.node);
}

void PrefixTree::lapse_uses() {
    while (!lapses_.empty() && lapses_.begin()->first <= num_evicted_blocks_) {
        forget_future(*lapses_.begin()->second);
    }
}

}  // namespace parrot::kvcache
