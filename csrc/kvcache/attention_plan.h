// Planning of SharedPrefixAttention: from the block tables of a batch to a flat, balanced work list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvcache/attention_segments.h"

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

    // What an entry costs besides its tokens, in tokens' worth of a worker's time: its start, and each query
    // row, whose result is written and, where it is a part, read again.
    int32_t entry_tokens = 80;
    int32_t row_tokens = 0;
    // How much the work of all workers together weighs against the last one's end: workers that share a
    // memory speed up as others end.
    int32_t work_percent = 0;
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
    // is not positive or exceeds its block table, or for a negative block id. The plan is valid until the
    // next call.
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
    // Segments of one length, in tiles of tokens, and of one number of rows, as far as the balance is
    // concerned.
    struct Load {
        int32_t tiles;
        int32_t cost;  // of each of its entries, besides the tiles
        int64_t copies;
    };

    // How a segment is cut: `count` entries of `tiles` each, the last one of what is left.
    struct Cut {
        int32_t count, tiles;
    };

    static Cut cut(int32_t tiles, int32_t chunk_tiles);
    Cut cut(const AttentionSegment& segment) const;
    int32_t entry_cost(int32_t members) const;
    void collect_loads();
    int32_t choose_chunk_tiles();
    int64_t even_time(int32_t chunk_tiles) const;
    int64_t makespan(int32_t chunk_tiles);
    void sort_entries(int32_t chunk_tiles);
    void emit();
    void order_segments();
    void count_parts();
    void emit_tile(const AttentionSegment& segment, int32_t tile, int32_t count);

    AttentionPlanOptions options_;
    AttentionSegments segments_;
    AttentionPlan plan_;
    int32_t chunk_tiles_ = 1;  // of an entry at most
    std::vector<Load> loads_;
    int64_t time_unit_ = 1;                             // the makespan counts in it, in tokens
    std::vector<int64_t> entries_by_time_;              // how many take each number of units
    std::vector<std::pair<int64_t, int64_t>> workers_;  // (load, how many workers have it), a heap
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
