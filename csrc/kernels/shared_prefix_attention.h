// Host interface of SharedPrefixAttention; see shared_prefix_attention.cuh for the operation.
#pragma once

#include <cstdint>

namespace parrot {

// Addresses are device addresses; shapes in elements. See SharedPrefixAttentionParams for each buffer's
// shape.
struct SharedPrefixAttentionCall {
    std::uintptr_t query, key_cache, value_cache, output;
    std::uintptr_t block_tables, entries, num_entries, members, part_begin;
    std::uintptr_t part_output, part_max_sum, next_work;
    int num_requests, num_blocks, max_blocks, num_heads, num_kv_heads, head_dim;
    bool is_bfloat16;
    float softmax_scale;
    std::uintptr_t stream;
};

// Blocks of a full persistent grid on the current device for this head size: what a plan balances over.
int shared_prefix_attention_grid(int head_dim);

// Launches on the stream. The kernel ahead in the stream must not write the plan or a block that two requests
// share. Throws std::invalid_argument for what it cannot run, std::runtime_error when CUDA
// fails.
void shared_prefix_attention(const SharedPrefixAttentionCall& call);

}  // namespace parrot
