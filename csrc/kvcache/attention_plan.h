// Planning of SharedPrefixAttention: from the block tables of a batch to a flat, balanced work list.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace parrot {

// What a plan balances over and what the kernel can take.
struct AttentionPlanOptions {
    int32_t block_size = 16;
    int32_t group_size = 1;  // query heads per KV head
    int32_t num_kv_heads = 1;
    int32_t num_workers = 1;         // thread blocks that run at once
    int32_t max_rows = 64;           // query rows of an entry: members * group_size
    int32_t min_shared_tokens = 64;  // a shorter run of shared tokens is left to each request
    int32_t min_chunk_tokens = 128;  // entries are not split below this
    bool share = true;               // off: every request reads its own tokens
};

// The work list, in int32 buffers that go to the device as they are (see SharedPrefixAttentionParams).
struct AttentionPlan {
    std::vector<int32_t>
        entries;  // [num_entries, 8]: representative, begin, end, first member, members, part, 0, 0
    std::vector<int32_t> members;     // [num_members, 2]: request, part (-1: its only one)
    std::vector<int32_t> part_begin;  // [num_requests + 1]
};

// Plans one decode step. Requests that name the same physical blocks share them; nothing else is assumed
// about where the block tables come from. Deterministic. Throws std::invalid_argument for a length that is
// not positive or exceeds its block table, or for a negative block id.
//   block_tables  [num_requests, max_blocks]
//   seq_lens      [num_requests], the token being decoded included
AttentionPlan plan_attention(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                             const AttentionPlanOptions& options);

}  // namespace parrot
