// Planning of SharedPrefixAttention: from the block tables of a batch to a flat, balanced work list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "kvcache/attention_balance.h"
#include "kvcache/attention_segments.h"

namespace parrot {

// What a plan balances over and what the kernel can take.
struct AttentionPlanOptions {
    int32_t block_size = 16;
    int32_t group_size = 1;  // query heads per KV head
    int32_t num_kv_heads = 1;
    int32_t num_workers = 1;         // thread blocks that run at once
    int32_t max_rows = 64;           // query rows of an entry: members * group_size
    int32_t min_shared_tokens = 64;  // a run of shared tokens is left to each request if shorter than this,
                                     // or where reading it together would cost more
    int32_t min_chunk_tokens = 128;  // entries are not split below this
    bool share = true;               // off: every request reads its own tokens

    // What an entry costs besides its tokens, in tokens' worth of a worker's time: its start, for one that
    // several requests share and for a request's own, and each query row, whose result is written and, where
    // it is a part, read again. Docs: attention.md, Balance.
    int32_t entry_tokens = 110;
    int32_t own_entry_tokens = 5;
    int32_t row_tokens = 5;

    // That the caller has room for; a plan of more is refused before it is made.
    int32_t max_entries = std::numeric_limits<int32_t>::max();
    int32_t max_members = std::numeric_limits<int32_t>::max();
};

// The work list, in int32 buffers that go to the device as they are (see SharedPrefixAttentionParams).
struct AttentionPlan {
    std::vector<int32_t>
        entries;  // [num_entries, 8]: representative, begin, end, first member, members, part, 0, 0
    std::vector<int32_t> members;     // [num_members, 2]: request, part (-1: its only one)
    std::vector<int32_t> part_begin;  // [num_requests + 1]
};

// Plans step after step, and keeps what the next step can use again: who shares what, and its buffers. While
// the requests are the same and only grew, the shared structure is not looked for again, and the plan is the
// one that a new planner would make. One exception: requests that come to share a block behind all that they
// had when the structure was last looked for read it each for themselves; a cache that copies on write never
// makes such a block.
class AttentionPlanner {
  public:
    // Plans one decode step. Requests that name the same physical blocks share them; nothing else is assumed
    // about where the block tables come from. Deterministic. Throws std::invalid_argument for a length that
    // is not positive or exceeds its block table, for a negative block id, or where the options leave no room
    // for the plan. The plan is valid until the next call.
    //   block_tables  [num_requests, max_blocks]
    //   seq_lens      [num_requests], the token being decoded included
    const AttentionPlan& plan(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                              const AttentionPlanOptions& options);
    // How often the shared structure was looked for.
    int64_t num_searches() const { return segments_.num_searches(); }
    // The largest block id that a request of the last step reads; -1: there is none.
    int32_t max_block() const { return segments_.max_block(); }
    // Requests of the last step that some entry reads together with others.
    int32_t num_sharing() const { return num_sharing_; }

  private:
    AttentionBalance::Cut cut(const AttentionSegment& segment) const;
    AttentionSharing sharing() const;
    int32_t entry_cost(bool is_shared, int32_t members) const;
    void choose_chunks();
    void check_room() const;
    void emit();
    void order_segments();
    void count_parts();
    void emit_tile(const AttentionSegment& segment, int32_t tile, int32_t count);

    AttentionPlanOptions options_;
    AttentionSegments segments_;
    AttentionPlan plan_;
    AttentionBalance balance_;
    AttentionChunks chunks_;
    struct Place {
        int64_t key;  // its order before ties
        int32_t segment;
    };
    std::vector<Place> sorted_;  // segments in the order of the work list
    std::vector<int32_t> next_part_;
    std::vector<uint8_t> is_sharing_;  // [num_requests]
    int32_t num_sharing_ = 0;
};

// A single step.
AttentionPlan plan_attention(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                             const AttentionPlanOptions& options);

}  // namespace parrot
