// Rotary embedding of queries and keys, which then take their places: queries in a tensor, keys and values in
// the pages of the KV cache.
#pragma once

#include <cstdint>

#include "kernels/cpu/dtype.h"

namespace parrot::cpu {

struct RopeAppendCall {
    const float* qkv;      // [rows, (heads + 2 * kv_heads) * head_dim]: queries, keys, values
    const float* cos;      // [rows, head_dim / 2]
    const float* sin;      // [rows, head_dim / 2]
    const int64_t* slots;  // [rows], each below num_blocks * 16 and used once
    void* query;           // [rows, heads, head_dim] of `dtype`
    void* key_cache;       // [num_blocks] of kv_block.h
    void* value_cache;     // as key_cache
    DType dtype;
    int64_t rows, heads, kv_heads, head_dim;  // head_dim even, at most kMaxHeadDim
};

// Element i of a head turns with element i + head_dim / 2, in fp32; the result is rounded once.
void rope_append(const RopeAppendCall& call);

}  // namespace parrot::cpu
