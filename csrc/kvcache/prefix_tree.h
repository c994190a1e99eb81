// The tree of token ranges and their blocks: match, split, grow, cut, pin, evict. ContextTree checks
// arguments.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/block_pool.h"
#include "kvcache/node.h"

namespace parrot::kvcache {

struct Match {
    Node* node = nullptr;     // the node in which the match ends; nullptr: the domain has nothing
    std::int32_t length = 0;  // in (node->start, node->end]
};

/// A context of whose future nothing is known counts as used again in so many steps: those that are known to
/// be needed sooner outlive it, those that are known to be needed later do not.
constexpr std::int32_t kUnknownSteps = 16;
/// A use is believed until the blocks of so many whole pools were evicted without news of it.
constexpr std::int64_t kLapsePools = 8;

class PrefixTree {
  public:
    PrefixTree(std::int32_t num_blocks, std::int32_t block_size);

    /// The root of a domain, made on first use.
    Node& root(std::int64_t domain);
    /// Longest prefix of which every token is there in the domain that it has here; with ``committed_only``
    /// of tokens that have their KV.
    Match match(const Domains& domains, std::span<const std::int32_t> tokens, bool committed_only) const;
    /// The node on the path to ``below`` that ends at ``length`` (committed there); splits one if needed.
    Node& node_ending_at(Node& below, std::int32_t length);

    void attach(Context& context, Node& node);
    void detach(Context& context);
    void move(Context& context, Node& node);
    /// Held becomes cached.
    void let_go(Context& context);

    /// What is known of a cached context's future: its first ``length`` tokens have ``remaining_uses`` more
    /// uses, the next one in ``steps`` steps. Replaces what was known; the rest of its path has no use.
    void set_use(Context& context, std::int32_t length, std::int32_t remaining_uses, std::int32_t steps);

    /// Append reserved tokens, of one domain, to a held context whose end is committed. Blocks must be there
    /// (blocks_for).
    void append(Context& context, std::span<const std::int32_t> tokens, std::int32_t* slots,
                std::vector<BlockCopy>& copies);
    /// Blocks that append will take; ``batch_mark`` tells apart the batches that are planned.
    std::int64_t blocks_for(Node& node, std::int32_t count, std::int64_t batch_mark) const;
    void commit(Context& context);
    /// The last reserved token of a context is another one than append was told.
    void set_last_token(Context& context, std::int32_t token);
    /// Shorten a context; what nobody else uses beyond ``length`` is freed at once.
    void cut(Context& context, std::int32_t length);
    /// Free at least ``num_blocks`` blocks (that many must be evictable), leaves first, by EvictionKey.
    void evict(std::int32_t num_blocks);
    void evict_all();
    /// Ids of contexts that eviction shortened, in that order; forgets them.
    std::vector<std::int64_t> take_evicted_ids();

    /// Block ids of the path to ``node`` in order, -1 past the end.
    void write_block_table(const Node& node, std::span<std::int32_t> row) const;
    std::int32_t num_table_blocks(const Node& node) const { return ceil_blocks(node.end); }
    std::vector<std::int32_t> committed_tokens(const Node& node) const;
    /// Throws std::runtime_error; ``num_contexts``: how many there must be.
    void check_invariants(std::size_t num_contexts) const;

    std::int32_t block_size() const { return block_size_; }
    std::int32_t num_blocks() const { return pool_.num_blocks(); }
    std::int32_t num_free_blocks() const { return pool_.num_free(); }
    std::int32_t num_held_blocks() const { return num_held_blocks_; }
    std::int32_t num_evictable_blocks() const { return pool_.num_used() - num_held_blocks_; }
    std::int64_t num_evicted_blocks() const { return num_evicted_blocks_; }

  private:
    /// splitmix64: node ids and tokens are small consecutive numbers.
    struct HashChildKey {
        std::size_t operator()(std::uint64_t key) const {
            key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9U;
            key = (key ^ (key >> 27)) * 0x94d049bb133111ebU;
            return static_cast<std::size_t>(key ^ (key >> 31));
        }
    };

    /// Children of the parent's own domain go by their first token. A tenant's children of a public node go
    /// by that and the tenant, so that a template which all tenants use does not make one long list of them.
    /// The upper half of the numbers, which no token has, is theirs; two of them may meet in one.
    static std::uint64_t child_key(const Node& parent, std::int64_t domain, std::int32_t first_token) {
        auto low = static_cast<std::uint32_t>(first_token);
        if (domain != parent.domain) {
            constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15U;  // spreads small consecutive numbers
            const std::uint64_t mixed = (static_cast<std::uint64_t>(domain) * kOdd + low) * kOdd;
            low = static_cast<std::uint32_t>(mixed >> 32) | 0x80000000U;
        }
        return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(parent.id)) << 32) | low;
    }
    std::int32_t ceil_blocks(std::int32_t length) const {
        return length / block_size_ + (length % block_size_ != 0 ? 1 : 0);
    }

    Node* first_child(const Node& parent, std::int64_t domain, std::int32_t first_token) const;
    Node& make_node();
    void recycle(Node& node);
    void link_child(Node& parent, Node& child, std::int32_t first_token);
    void unlink_child(Node& child);
    void drop_root_if_empty(Node& node);

    void link_context(Context& context, Node& node);
    void unlink_context(Context& context);
    void pin(Node* node);
    void unpin(Node* node);
    void refresh_queue(Node& node);
    EvictionKey eviction_key(const Node& node) const;
    void add_use(Context& context, Node& node);
    void remove_use(Context& context);
    void forget_future(Context& context);
    void lapse_uses();

    Node& split(Node& node, std::int32_t position);
    Node& add_tip(Context& context, std::int32_t first_token, std::vector<BlockCopy>& copies);
    void add_block(Node& node);
    void shrink(Node& node, std::int32_t end);
    void remove_leaf(Node& node);
    std::int32_t evict_from(Node& leaf, std::int32_t num_blocks);

    struct Tally {
        std::int32_t num_children = 0;
        std::int32_t num_pins = 0;  // children with pins
        std::int32_t num_tail_writers = 0;
        std::int32_t num_uses = 0;  // contexts whose use_node it is
    };
    std::vector<Tally> tally_children() const;  // by node id
    void check_range(const Node& node) const;
    void check_domains(const Node& node) const;
    void check_links(std::size_t num_nodes) const;
    void check_counts(const Node& node, Tally tally) const;
    void check_uses(const Node& node, const Tally& tally) const;
    void check_queue() const;
    void check_blocks() const;

    std::int32_t block_size_;
    BlockPool pool_;
    std::deque<Node> nodes_;  // by id; addresses are stable
    std::vector<std::int32_t> unused_node_ids_;
    std::unordered_map<std::int64_t, Node*> roots_;                    // by domain
    std::unordered_map<std::uint64_t, Node*, HashChildKey> children_;  // by child_key: the first of the twins
    std::set<EvictionKey> eviction_queue_;                             // leaves without pins
    std::set<UseKey> uses_;                                            // the nearest of a node comes first
    std::set<std::pair<std::int64_t, Context*>> lapses_;               // (lapses_at, context) of each use
    std::vector<std::int64_t> evicted_context_ids_;
    std::int32_t num_held_blocks_ = 0;  // own blocks of nodes with pins
    std::int64_t num_evicted_blocks_ = 0;
    std::int64_t tick_ = 0;
};

}  // namespace parrot::kvcache
