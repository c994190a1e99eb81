// What one step's attention computes, cut into items that threads claim one by one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/attention_kernels.h"
#include "kvcache/attention_plan.h"

namespace parrot::cpu {

struct AttentionShape {
    int32_t num_heads = 0;
    int32_t num_kv_heads = 0;
    int32_t head_dim = 0;  // a multiple of 16, at most 512

    int32_t group_size() const { return num_heads / num_kv_heads; }
};

// The sequences of a step. Sequence i has the rows [query_start[i], query_start[i + 1]), its last tokens.
struct AttentionStep {
    std::span<const int32_t> query_start;   // [n + 1]
    std::span<const int32_t> seq_lens;      // [n], this step's tokens included
    std::span<const int32_t> block_tables;  // [n, max_blocks], not looked at past a sequence's end
    int32_t max_blocks = 0;
    int32_t num_blocks = 0;  // of the cache
};

struct AttentionOptions {
    int num_threads = 1;
    bool share = true;               // off: every decoding sequence reads its own tokens
    int32_t min_shared_tokens = 64;  // a shorter run of shared tokens is left to each sequence
};

// A range of KV heads of an entry, and the units that wait for it.
struct AttentionWorkItem {
    const int32_t* block_table;
    int32_t begin, end;
    int32_t first_member, num_members;  // of AttentionWork::members
    int32_t head_begin, head_end;
    int64_t cost;  // in tokens read by one row of one head
};

// Rows whose parts are merged when the last of them is there: row r's part p is the partial row
// first_partial + p * num_rows + r.
struct AttentionUnit {
    int32_t first_row, num_rows;
    int32_t first_partial;
    int32_t num_parts;
    int32_t num_items;  // that contribute
};

struct AttentionWork {
    std::vector<AttentionWorkItem> items;  // the most expensive first
    std::vector<AttentionMember> members;
    std::vector<AttentionUnit> units;
    int32_t num_partials = 0;  // rows of partial results
    int32_t num_sharing = 0;   // decodes that read a part of their tokens together with others
    int32_t max_states = 0;    // most (head, query row) pairs of one item
    int64_t cost = 0;
};

// Throws std::invalid_argument for lengths, ranges or block ids that do not fit, naming them. The items point
// into step.block_tables, which has to outlive them. Deterministic. `planner` finds what decodes share, and
// keeps it for the next step.
AttentionWork make_attention_work(const AttentionShape& shape, const AttentionStep& step,
                                  const AttentionOptions& options, AttentionPlanner& planner);

}  // namespace parrot::cpu
