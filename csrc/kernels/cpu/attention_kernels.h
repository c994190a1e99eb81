// What the attention of one instruction set offers, and what it is given: plain pointers, checked by
// attention.cpp. Shared by sources with different flags: no inline functions here that they would share.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.h"
#include "kernels/cpu/kv_block.h"

namespace parrot::cpu {

inline constexpr int kTileTokens = 64;  // tokens whose scores are computed at a time

// One query token of an item: heads_per_kv_head query rows in each KV head.
struct AttentionMember {
    int32_t row;      // of the step
    int32_t visible;  // tokens of its sequence that it sees, itself included
    int32_t partial;  // row of the partial results; -1: its only part, so that the result is final
    int32_t unit;     // whose parts are merged together; -1: none
};

// The tensors of one call. Strides are in elements.
struct AttentionTensors {
    const void* query;  // [rows, num_heads, head_dim]
    const void* keys;   // [num_blocks] of kv_block.h
    const void* values;
    void* output;  // [rows, num_heads, head_dim]
    int64_t query_stride;
    int64_t output_stride;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;  // a multiple of 16
    float scale;       // of the scores, times log2(e): the softmax is in powers of two
};

// The parts of rows that several items compute: softmax numerators, and (maximum, denominator) of each.
struct AttentionPartials {
    float* numerators;  // [partial, num_heads, head_dim]
    float* max_sums;    // [partial, num_heads, 2]
};

// Attention of some query tokens over tokens [begin, end) of one sequence, for a range of KV heads.
struct AttentionItem {
    const int32_t* block_table;
    int32_t begin;  // a multiple of 16
    int32_t end;
    const AttentionMember* members;
    int32_t num_members;
    int32_t head_begin;  // of KV heads
    int32_t head_end;
    // What is asked for meanwhile. `next`, null if there is none, is what the thread is expected to do
    // afterwards. An item that multiplies longer than it reads also asks for some of those that only read.
    const AttentionItem* next;
    const AttentionItem* later;
    int32_t num_later;
    int32_t later_step;  // from one to the next
};

// Floats that attend() needs for one item: [heads][rows] of state, where rows = members * group size.
struct AttentionScratch {
    float* keys;       // [head_dim, 64]: a tile of many rows, where its words are pairs and a product takes
    float* values;     // [64, head_dim]   numbers
    float* scores;     // [kMaxTileRows, 64]
    float* query;      // [heads, rows, head_dim]
    float* output;     // [heads, rows, head_dim]
    float* reference;  // [heads, rows]: what the weights are relative to
    float* sum;        // [heads, rows, kSumLanes]
};
inline constexpr int kMaxTileRows = 6;
inline constexpr int kSumLanes = 16;  // a row's sum of weights, as a vector

struct AttentionKernels {
    void (*attend)(const AttentionTensors&, const AttentionItem&, const AttentionPartials&,
                   const AttentionScratch&);
    // Merges `num_parts` partial rows, `part_stride` apart from `first` on, into row `row` of the output.
    // What is there of each part's maximum becomes its weight.
    void (*merge)(const AttentionTensors&, const AttentionPartials&, int32_t first, int32_t part_stride,
                  int32_t num_parts, int32_t row);
};

enum class KvType : int { kFloat32, kBfloat16 };

// Kernels of each element type, of each instruction set.
extern const AttentionKernels kAttentionScalar[2];
#if defined(__x86_64__)
extern const AttentionKernels kAttentionAvx2[2];
extern const AttentionKernels kAttentionAvx512[2];
extern const AttentionKernels kAttentionAvx512Bf16;  // of bfloat16
#endif

}  // namespace parrot::cpu
