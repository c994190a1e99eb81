// What the prefix tree is made of: nodes, and the contexts that end at them. Plain data; PrefixTree keeps it
// right.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "mutants.h"

namespace parrot::kvcache {

struct Node;

/// The domain of text that the operator published: everybody's prompts match it.
constexpr std::int64_t kPublicDomain = 0;

/// Whose the tokens of a sequence are: [0, public_len) are published, everything behind is the domain's own.
/// KV depends on all tokens before it, so nothing behind a private token can ever be public.
struct Domains {
    std::int64_t domain = kPublicDomain;
    std::int32_t public_len = 0;

    std::int64_t at(std::int32_t position) const {
        return position < public_len || mutant("all_text_public") ? kPublicDomain : domain;
    }
    /// Where the range of one domain that ``position`` lies in ends.
    std::int32_t range_end(std::int32_t position) const {
        return position < public_len ? public_len : std::numeric_limits<std::int32_t>::max();
    }
};

/// A named end of a path. It ends exactly at node->end.
///
/// Only a cached context has hints. Its use_node is on its path: what is to be used again ends at that node's
/// end, since set_uses splits there and only eviction, which takes the use along, moves that end.
struct Context {
    std::int64_t id = 0;
    Node* node = nullptr;
    Context* previous = nullptr;  // others that end at the same node
    Context* next = nullptr;
    bool held = true;
    bool lost_tokens = false;     // waits in the list of evicted contexts
    bool hinted = false;          // without use_node: it will not be used again
    std::int32_t steps = 0;       // to its next use
    std::int64_t batch_mark = 0;  // the last batch it was part of: finds an id given twice
    Node* use_node = nullptr;
    std::int64_t lapses_at = 0;  // evicted blocks at which the use is no longer believed
    Domains domains;
};

/// What is known of a leaf's future, the least valuable first.
enum class Worth : std::uint8_t { kUnnamed, kUnused, kUsed };

/// Eviction order, first to go first: by worth, then the farthest next use, then the least recently used.
struct EvictionKey {
    Worth worth = Worth::kUnnamed;
    std::int32_t nearness = 0;  // minus the steps to the next use
    std::int64_t last_use = 0;
    std::int32_t node_id = 0;
    auto operator<=>(const EvictionKey&) const = default;
};

/// One context's next use of everything up to the end of a node.
struct UseKey {
    std::int32_t node_id = 0;
    std::int32_t steps = 0;
    std::int64_t context_id = 0;
    auto operator<=>(const UseKey&) const = default;
};

/// Tokens [start, end) of every sequence through this node, and the blocks that hold their KV.
///
/// All of them belong to one domain. The parent's is the same, or the public one: below a published prefix
/// each tenant has children of its own.
///
/// blocks[0] is block start / block_size of the sequence. When start lies inside a block, blocks[0] is either
/// the parent's last block (shares_first_block: this node writes on behind the parent's slots) or a copy of
/// it, which replaces the parent's block in the tables of everything below. At most one child can write on
/// behind its parent (the parent's tail_taken), so the nodes that refer to one block are a piece of one path.
struct Node {
    std::int32_t id = 0;
    std::int32_t start = 0;
    std::int32_t committed = 0;  // [start, committed) has its KV; [committed, end) is reserved by one context
    std::int32_t end = 0;
    std::int64_t domain = 0;
    Node* parent = nullptr;     // nullptr: the root of a domain, an empty range
    Node* next_twin = nullptr;  // siblings of the same key (PrefixTree::child_key)
    Node* previous_twin = nullptr;
    std::vector<std::int32_t> tokens;  // [end - start]
    std::vector<std::int32_t> blocks;  // [ceil(end / block_size) - start / block_size]
    Context* first_context = nullptr;
    std::int32_t num_contexts = 0;
    std::int32_t num_unhinted = 0;  // contexts that end here of whose future nothing is known
    std::int32_t num_uses = 0;      // contexts whose use_node this is
    std::int32_t num_children = 0;
    std::int32_t num_pins = 0;  // held contexts that end here + children with pins; > 0: not evictable
    bool live = false;
    bool shares_first_block = false;
    bool tail_taken = false;
    bool queued = false;  // is in the eviction queue, under eviction_key
    EvictionKey eviction_key;
    std::int64_t last_use = 0;    // tick at which the last pin went
    std::int64_t batch_mark = 0;  // the last batch that planned to write behind this node's last slot

    bool is_root() const { return parent == nullptr; }
    /// Nobody but one context ends here or further down: it may grow and shrink in place.
    bool is_sole_tip() const { return !is_root() && num_children == 0 && num_contexts == 1; }
    /// Blocks that are free once this node is gone: a shared block counts for the highest of its nodes.
    std::int32_t num_own_blocks() const {
        return static_cast<std::int32_t>(blocks.size()) - (shares_first_block ? 1 : 0);
    }
};

/// Slots [0, num_slots) of a block to be copied before the step writes.
struct BlockCopy {
    std::int32_t source;
    std::int32_t destination;
    std::int32_t num_slots;
};

}  // namespace parrot::kvcache
