#include "kvcache/context_tree.h"

#include <algorithm>
#include <limits>
#include <unordered_set>

namespace parrot::kvcache {

namespace {

constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();

std::int32_t checked_block_size(std::int64_t block_size) {
    require(block_size > 0 && block_size <= kMaxSlots, "block_size must be in [1, ", kMaxSlots, "], got ",
            block_size);
    return static_cast<std::int32_t>(block_size);
}

std::int32_t checked_num_blocks(std::int64_t num_blocks, std::int64_t block_size) {
    const std::int64_t most = kMaxSlots / checked_block_size(block_size);
    require(num_blocks > 0 && num_blocks <= most, "num_blocks must be in [1, ", most, "] with block_size ",
            block_size, ", so that slots fit int32; got ", num_blocks);
    return static_cast<std::int32_t>(num_blocks);
}

void require_tokens(std::span<const std::int32_t> token_ids) {
    const auto negative = std::find_if(token_ids.begin(), token_ids.end(), [](auto id) { return id < 0; });
    require(negative == token_ids.end(), "token_ids must be >= 0, got ",
            negative == token_ids.end() ? 0 : *negative, " at index ", negative - token_ids.begin());
}

void require_counts(const char* argument, std::span<const std::int32_t> values,
                    std::span<const std::int64_t> context_ids) {
    require(values.size() == context_ids.size(), argument, " must have ", context_ids.size(),
            " entries, one for each of context_ids, got ", values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
        require(values[i] >= 0, argument, " must be >= 0, got ", values[i], " for context_id ",
                context_ids[i]);
    }
}

Domains checked_domains(std::int64_t domain, std::int64_t public_len,
                        std::span<const std::int32_t> token_ids) {
    require(public_len >= 0 && public_len <= static_cast<std::int64_t>(token_ids.size()),
            "public_len must be in [0, len(token_ids)] = [0, ", token_ids.size(), "], got ", public_len);
    // Everything is public in that domain, so there is no seam in it.
    return {domain, domain == kPublicDomain ? 0 : static_cast<std::int32_t>(public_len)};
}

bool has_reservation(const Context& context) { return context.node->committed < context.node->end; }

}  // namespace

ContextTree::ContextTree(std::int64_t num_blocks, std::int64_t block_size)
    : tree_(checked_num_blocks(num_blocks, block_size), checked_block_size(block_size)) {}

std::int32_t ContextTree::open(std::int64_t context_id, std::int64_t domain,
                               std::span<const std::int32_t> token_ids, std::int64_t max_prefix,
                               std::int64_t public_len) {
    require_new(context_id);
    const Domains domains = checked_domains(domain, public_len, token_ids);
    require(max_prefix >= 0 && max_prefix <= static_cast<std::int64_t>(token_ids.size()),
            "max_prefix must be in [0, len(token_ids)] = [0, ", token_ids.size(), "], got ", max_prefix);
    require_tokens(token_ids);
    const Match match = tree_.match(domains, token_ids.first(static_cast<std::size_t>(max_prefix)), true);
    start(context_id, domains, match.length > 0 ? &tree_.node_ending_at(*match.node, match.length) : nullptr);
    return match.length;
}

void ContextTree::fork(std::int64_t context_id, std::int64_t parent_context_id, std::int64_t length) {
    require_new(context_id);
    const Context& parent = known("parent_context_id", parent_context_id);
    require(length >= 0 && length <= parent.node->committed, "length must be in [0, ", parent.node->committed,
            "], the committed tokens of context ", parent_context_id, ", got ", length);
    const auto at = static_cast<std::int32_t>(length);
    // What follows may be any text, also where the parent's is published.
    const Domains domains{parent.domains.domain, std::min(parent.domains.public_len, at)};
    start(context_id, domains, at > 0 ? &tree_.node_ending_at(*parent.node, at) : nullptr);
}

std::int32_t ContextTree::pending_prefix(std::int64_t domain, std::span<const std::int32_t> token_ids,
                                         std::int64_t public_len) const {
    const Domains domains = checked_domains(domain, public_len, token_ids);
    require_tokens(token_ids);
    return tree_.match(domains, token_ids, false).length;
}

std::vector<BlockCopy> ContextTree::reserve(std::span<const std::int64_t> context_ids,
                                            std::span<const std::int32_t> counts,
                                            std::span<const std::int32_t> token_ids,
                                            std::span<std::int32_t> slots) {
    require(counts.size() == context_ids.size(), "counts must have ", context_ids.size(),
            " entries, one for each of context_ids, got ", counts.size());
    std::int64_t num_tokens = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        require(counts[i] > 0, "counts must be > 0, got ", counts[i], " for context_id ", context_ids[i]);
        num_tokens += counts[i];
    }
    require(static_cast<std::int64_t>(token_ids.size()) == num_tokens,
            "token_ids must have sum(counts) = ", num_tokens, " entries, got ", token_ids.size());
    require(slots.size() == token_ids.size(), "slots must have sum(counts) = ", num_tokens, " entries, got ",
            slots.size());
    require_tokens(token_ids);
    gather_batch(context_ids, Reservation::kNone);
    require_one_domain(counts);
    make_room(counts);

    std::vector<BlockCopy> copies;
    std::size_t first = 0;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
        const auto count = static_cast<std::size_t>(counts[i]);
        tree_.append(*batch_[i], token_ids.subspan(first, count), slots.data() + first, copies);
        first += count;
    }
    counters_.cow_copies += static_cast<std::int64_t>(copies.size());
    return copies;
}

void ContextTree::require_one_domain(std::span<const std::int32_t> counts) const {
    for (std::size_t i = 0; i < batch_.size(); ++i) {
        const Context& context = *batch_[i];
        const std::int32_t end = context.node->end;
        require(counts[i] <= context.domains.range_end(end) - end, "counts: ", counts[i],
                " tokens behind the ", end, " of context ", context.id, " go over its public_len of ",
                context.domains.public_len, "; reserve up to there first");
    }
}

/// Evicts until the batch fits. The block that a copy reads is safe from this: the context that copies it is
/// held, and so is the path above it.
void ContextTree::make_room(std::span<const std::int32_t> counts) {
    std::int64_t num_needed = 0;
    for (std::size_t i = 0; i < batch_.size(); ++i) {
        num_needed += tree_.blocks_for(*batch_[i]->node, counts[i], batch_mark_);
    }
    const std::int32_t num_free = tree_.num_free_blocks();
    if (num_needed > static_cast<std::int64_t>(num_free) + tree_.num_evictable_blocks()) {
        throw OutOfBlocks(concat("reserve needs ", num_needed, " blocks; ", num_free, " are free, ",
                                 tree_.num_evictable_blocks(), " evictable, ", tree_.num_held_blocks(),
                                 " held, of ", tree_.num_blocks()));
    }
    if (num_needed > num_free) tree_.evict(static_cast<std::int32_t>(num_needed) - num_free);
}

void ContextTree::commit(std::span<const std::int64_t> context_ids) {
    gather_batch(context_ids, Reservation::kOpen);
    for (Context* context : batch_) tree_.commit(*context);
}

void ContextTree::set_last_tokens(std::span<const std::int64_t> context_ids,
                                  std::span<const std::int32_t> token_ids) {
    require(token_ids.size() == context_ids.size(), "token_ids must have ", context_ids.size(),
            " entries, one for each of context_ids, got ", token_ids.size());
    require_tokens(token_ids);
    gather_batch(context_ids, Reservation::kOpen);
    for (std::size_t i = 0; i < batch_.size(); ++i) tree_.set_last_token(*batch_[i], token_ids[i]);
}

void ContextTree::rollback(std::span<const std::int64_t> context_ids) {
    gather_batch(context_ids, Reservation::kOpen);
    for (Context* context : batch_) tree_.cut(*context, context->node->committed);
}

void ContextTree::truncate(std::int64_t context_id, std::int64_t length) {
    Context& context = held("context_id", context_id);
    require(!has_reservation(context), "context_id ", context_id,
            " has an open reservation: commit or roll back");
    require(length >= 0 && length <= context.node->end, "length must be in [0, ", context.node->end,
            "], the length of context ", context_id, ", got ", length);
    tree_.cut(context, static_cast<std::int32_t>(length));
    // What follows may be any text, also where the cut one was published.
    std::int32_t& public_len = context.domains.public_len;
    public_len = std::min(public_len, static_cast<std::int32_t>(length));
    if (length == 0) tree_.move(context, tree_.root(context.domains.at(0)));
}

void ContextTree::release(std::int64_t context_id) {
    Context& context = held("context_id", context_id);
    tree_.cut(context, context.node->committed);
    tree_.let_go(context);
}

void ContextTree::free(std::int64_t context_id) {
    Context& context = known("context_id", context_id);
    tree_.cut(context, context.node->committed);
    tree_.detach(context);
    contexts_.erase(context_id);
}

void ContextTree::set_uses(std::span<const std::int64_t> context_ids,
                           std::span<const std::int32_t> prefix_lengths,
                           std::span<const std::int32_t> remaining_uses,
                           std::span<const std::int32_t> steps_to_next_use) {
    require_counts("prefix_lengths", prefix_lengths, context_ids);
    require_counts("remaining_uses", remaining_uses, context_ids);
    require_counts("steps_to_next_use", steps_to_next_use, context_ids);
    ++batch_mark_;
    batch_.clear();
    for (const std::int64_t id : context_ids) {
        Context& context = known("context_ids", id);
        require(!context.held, "context_ids ", id, " is held, not cached");
        require(context.batch_mark != batch_mark_, "context_ids has ", id, " twice");
        context.batch_mark = batch_mark_;
        batch_.push_back(&context);
    }
    for (std::size_t i = 0; i < batch_.size(); ++i) {
        tree_.set_use(*batch_[i], prefix_lengths[i], remaining_uses[i], steps_to_next_use[i]);
    }
}

std::int64_t ContextTree::num_distinct_tokens(std::span<const std::int64_t> context_ids) const {
    std::unordered_set<const Node*> seen;
    std::int64_t total = 0;
    for (const std::int64_t context_id : context_ids) {
        // What is above a node that was seen was seen with it.
        for (const Node* node = known("context_ids", context_id).node;
             !node->is_root() && seen.insert(node).second; node = node->parent) {
            total += node->end - node->start;
        }
    }
    return total;
}

void ContextTree::lengths(std::span<const std::int64_t> context_ids, std::span<std::int32_t> out) const {
    require(out.size() == context_ids.size(), "out must have ", context_ids.size(),
            " entries, one for each of context_ids, got ", out.size());
    for (const std::int64_t id : context_ids) known("context_ids", id);
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = known("context_ids", context_ids[i]).node->end;
}

void ContextTree::block_tables(std::span<const std::int64_t> context_ids, std::span<std::int32_t> out,
                               std::size_t max_blocks) const {
    require(out.size() == context_ids.size() * max_blocks, "out must have ", context_ids.size(),
            " rows, one for each of context_ids, got ", out.size(), " entries in rows of ", max_blocks);
    for (const std::int64_t id : context_ids) {
        const auto num_blocks =
            static_cast<std::size_t>(tree_.num_table_blocks(*known("context_ids", id).node));
        require(num_blocks <= max_blocks, "out has rows of ", max_blocks, " blocks, but context ", id,
                " has ", num_blocks);
    }
    for (std::size_t i = 0; i < context_ids.size(); ++i) {
        tree_.write_block_table(*known("context_ids", context_ids[i]).node,
                                out.subspan(i * max_blocks, max_blocks));
    }
}

std::vector<std::int32_t> ContextTree::tokens(std::int64_t context_id) const {
    return tree_.committed_tokens(*known("context_id", context_id).node);
}

std::vector<std::pair<std::int64_t, std::int32_t>> ContextTree::take_evicted() {
    std::vector<std::pair<std::int64_t, std::int32_t>> evicted;
    for (const std::int64_t id : tree_.take_evicted_ids()) {
        const auto found = contexts_.find(id);
        // Freed since, and perhaps made anew: that one lost nothing.
        if (found == contexts_.end() || !found->second.lost_tokens) continue;
        found->second.lost_tokens = false;
        evicted.emplace_back(id, found->second.node->committed);
    }
    return evicted;
}

void ContextTree::reset() {
    contexts_.clear();
    batch_.clear();
    tree_ = PrefixTree(tree_.num_blocks(), tree_.block_size());
}

const Context& ContextTree::known(const char* argument, std::int64_t context_id) const {
    const auto found = contexts_.find(context_id);
    if (found == contexts_.end())
        throw UnknownContext(concat(argument, ": no context has the id ", context_id));
    return found->second;
}

Context& ContextTree::known(const char* argument, std::int64_t context_id) {
    return const_cast<Context&>(std::as_const(*this).known(argument, context_id));
}

Context& ContextTree::held(const char* argument, std::int64_t context_id) {
    Context& context = known(argument, context_id);
    require(context.held, argument, " ", context_id, " is cached, not held");
    return context;
}

void ContextTree::require_new(std::int64_t context_id) const {
    require(context_id > 0, "context_id must be > 0, got ", context_id);
    require(!contexts_.contains(context_id), "context_id ", context_id, " is in use");
}

/// ``node`` is null for a context that has nothing yet.
void ContextTree::start(std::int64_t context_id, const Domains& domains, Node* node) {
    Node& at = node != nullptr ? *node : tree_.root(domains.at(0));
    Context& context = contexts_[context_id];
    context.id = context_id;
    context.domains = domains;
    tree_.attach(context, at);
    counters_.matched_tokens += at.end;
    counters_.forks += at.end > 0 ? 1 : 0;
}

void ContextTree::gather_batch(std::span<const std::int64_t> context_ids, Reservation reservation) {
    ++batch_mark_;
    batch_.clear();
    for (const std::int64_t id : context_ids) {
        Context& context = held("context_ids", id);
        require(context.batch_mark != batch_mark_, "context_ids has ", id, " twice");
        require(has_reservation(context) == (reservation == Reservation::kOpen), "context_ids: ", id,
                reservation == Reservation::kOpen ? " has no open reservation"
                                                  : " has an open reservation already");
        context.batch_mark = batch_mark_;
        batch_.push_back(&context);
    }
}

}  // namespace parrot::kvcache
