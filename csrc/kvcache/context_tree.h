// Contexts by id over the prefix tree: the verbs of the KV cache (paper sections 5.3 and 7).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvcache/errors.h"
#include "kvcache/prefix_tree.h"

namespace parrot::kvcache {

struct Counters {
    std::int64_t matched_tokens = 0;
    std::int64_t forks = 0;  // opens and forks with a prefix
    std::int64_t cow_copies = 0;
};

/// Every verb checks its arguments first (std::invalid_argument, UnknownContext) and changes nothing when it
/// throws. A context is held from open or fork until release, and cached from then until free. One thread.
class ContextTree {
  public:
    ContextTree(std::int64_t num_blocks, std::int64_t block_size);
    ContextTree(const ContextTree&) = delete;
    ContextTree& operator=(const ContextTree&) = delete;

    /// The first ``public_len`` tokens are published, the rest is the domain's.
    std::int32_t open(std::int64_t context_id, std::int64_t domain, std::span<const std::int32_t> token_ids,
                      std::int64_t max_prefix, std::int64_t public_len);
    /// What of the parent's published text the fork has not is its domain's own.
    void fork(std::int64_t context_id, std::int64_t parent_context_id, std::int64_t length);
    std::int32_t pending_prefix(std::int64_t domain, std::span<const std::int32_t> token_ids,
                                std::int64_t public_len) const;

    /// context_ids, counts: [n]; token_ids, slots: [sum(counts)]. No context may go over the end of its
    /// published tokens: what is reserved by one is of one domain.
    std::vector<BlockCopy> reserve(std::span<const std::int64_t> context_ids,
                                   std::span<const std::int32_t> counts,
                                   std::span<const std::int32_t> token_ids, std::span<std::int32_t> slots);
    void commit(std::span<const std::int64_t> context_ids);
    /// The last reserved token of each of these contexts is this one, whatever reserve was told.
    void set_last_tokens(std::span<const std::int64_t> context_ids, std::span<const std::int32_t> token_ids);
    void rollback(std::span<const std::int64_t> context_ids);
    void truncate(std::int64_t context_id, std::int64_t length);
    void release(std::int64_t context_id);
    void free(std::int64_t context_id);
    /// All [n]; of cached contexts. A longer prefix than is left means all that is left.
    void set_uses(std::span<const std::int64_t> context_ids, std::span<const std::int32_t> prefix_lengths,
                  std::span<const std::int32_t> remaining_uses,
                  std::span<const std::int32_t> steps_to_next_use);

    void lengths(std::span<const std::int64_t> context_ids, std::span<std::int32_t> out) const;
    /// Tokens of these contexts together, reserved ones too; one that several share counts once.
    std::int64_t num_distinct_tokens(std::span<const std::int64_t> context_ids) const;
    /// out: [n, max_blocks], row by row.
    void block_tables(std::span<const std::int64_t> context_ids, std::span<std::int32_t> out,
                      std::size_t max_blocks) const;
    std::vector<std::int32_t> tokens(std::int64_t context_id) const;

    std::vector<std::pair<std::int64_t, std::int32_t>> take_evicted();
    void clear_cache() { tree_.evict_all(); }
    /// Forgets all contexts, whatever state they are in; only counters stay.
    void reset();
    void check_invariants() const { tree_.check_invariants(contexts_.size()); }

    const PrefixTree& tree() const { return tree_; }
    const Counters& counters() const { return counters_; }

  private:
    enum class Reservation { kNone, kOpen };

    const Context& known(const char* argument, std::int64_t context_id) const;
    Context& known(const char* argument, std::int64_t context_id);
    Context& held(const char* argument, std::int64_t context_id);
    void require_new(std::int64_t context_id) const;
    void start(std::int64_t context_id, const Domains& domains, Node* node);
    /// Fills batch_ with held contexts, none of them twice, with or without an open reservation.
    void gather_batch(std::span<const std::int64_t> context_ids, Reservation reservation);
    void require_one_domain(std::span<const std::int32_t> counts) const;
    void make_room(std::span<const std::int32_t> counts);

    PrefixTree tree_;
    std::unordered_map<std::int64_t, Context> contexts_;
    std::vector<Context*> batch_;
    std::int64_t batch_mark_ = 0;
    Counters counters_;
};

}  // namespace parrot::kvcache
