// Host interface of paged prefill; see paged_prefill.cuh for the operation.
#pragma once

#include <cstdint>

namespace parrot {

// Addresses are device addresses; shapes in elements. See prefill::Params for each buffer's shape.
struct PagedPrefillCall {
    std::uintptr_t query, key_cache, value_cache, output;
    std::uintptr_t tiles, block_tables, next_work;
    int num_rows, num_tiles, num_tokens, num_blocks, max_blocks, num_heads, num_kv_heads, head_dim;
    bool is_bfloat16;
    float softmax_scale;
    std::uintptr_t stream;
};

// Whether the current device runs it: compute capability 9.0, in a build for sm_90a.
bool has_paged_prefill();

// Query rows of a tile, at most.
int paged_prefill_rows();

// Launches on the stream. `num_tokens`: that the chunks attend to, in sum over the sequences; it only decides
// on an order. Throws std::invalid_argument for what it cannot run, another device than compute
// capability 9.0 too, std::runtime_error when CUDA fails.
void paged_prefill(const PagedPrefillCall& call);

}  // namespace parrot
