// The work list of SharedPrefixAttention, its parameters, and where a row's result goes; see
// shared_prefix_attention.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/instructions.cuh"

namespace parrot {

constexpr int kBlockTokens = 16;  // KV slots in a cache block
constexpr int kTileTokens = 64;   // tokens of one pipeline stage
constexpr int kWarps = 4;         // warps of a thread block that compute: on Hopper a warp group
constexpr int kThreads = 32 * kWarps;
// Warps that load, a page of each tile each: one warp issues bulk copies too slowly. On Hopper they are a
// warp group of their own, which gives its registers to the computing one.
constexpr int kLoaders = kTileTokens / kBlockTokens;
constexpr int kBlockThreads = kThreads + 32 * kLoaders;
constexpr int kHalfBytes = kTileTokens * 128;  // a tile lies in columns of 64 elements, 128 bytes a row
constexpr int kWarpRows = 16;                  // query rows of one tensor-core tile
constexpr int kMaxRows = kWarps * kWarpRows;
constexpr int kEntryFields = 8;  // representative, begin, end, first member, members, part, two unused

struct SharedPrefixAttentionParams {
    CUtensorMap key_map;  // [num_blocks * 16, num_kv_heads * head_dim] in boxes of 16 x 64; Hopper and later
    CUtensorMap value_map;
    const void* query;            // [num_requests, num_heads, head_dim], half or bfloat16
    const void* key_cache;        // [num_blocks, 16, num_kv_heads, head_dim]
    const void* value_cache;      // [num_blocks, 16, num_kv_heads, head_dim]
    void* output;                 // [num_requests, num_heads, head_dim]
    const int32_t* block_tables;  // [num_requests, max_blocks]
    const int32_t* entries;       // [num_entries, 8]
    const int32_t* num_entries;   // [1], on the device so that a CUDA graph can be replayed on another plan
    const int32_t* members;       // [num_members, 2]: request, part; part -1: the request has no other part
    const int32_t*
        part_begin;        // [num_requests + 1]: parts of request r are [part_begin[r], part_begin[r + 1])
    float* part_output;    // [max_parts, num_heads, head_dim], unnormalised
    float2* part_max_sum;  // [max_parts, num_heads]: running max (base 2) and sum
    int32_t* next_work;    // [2], zero before and after: items claimed after the first ones, blocks done
    int32_t num_requests;  // rows of the merge; those without parts in the plan are skipped
    int32_t max_blocks;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t merge_warps;  // of merge_parts_kernel that share a row: a power of two up to kMergeWarps
    float scale_log2;     // softmax scale times log2(e)
};

// Waits for the computing warps only.
__device__ inline void sync_computing() { asm volatile("bar.sync 1, %0;\n" ::"n"(kThreads) : "memory"); }

// One work item: an entry for one KV head, with what its threads need to find rows and tokens.
struct WorkItem {
    int kv_head;         // -1: no more work
    int representative;  // request whose block table names the blocks of [begin, end); the first member
    int begin;
    int end;
    int first_member;
    int num_members;
    int part;      // of the first member
    int num_rows;  // row r is query head r % group of member r / group

    __device__ int first_token() const { return begin / kBlockTokens * kBlockTokens; }
};

// An item as the leading loader hands it to the other warps.
struct ItemSlot {
    WorkItem item;
    int2 members[kMaxRows];  // request, part
};

__device__ inline WorkItem read_work(const SharedPrefixAttentionParams& p, int work) {
    const int4* entry =
        reinterpret_cast<const int4*>(p.entries) + (work / p.num_kv_heads) * (kEntryFields / 4);
    const int4 low = entry[0], high = entry[1];
    const int group = p.num_heads / p.num_kv_heads;
    return {work % p.num_kv_heads, low.x, low.y, low.z, low.w, high.x, high.y, high.x * group};
}

// Writes one row's result: straight to the output when the request has one part, else as a partial.
template <typename T, int kHeadDim>
struct RowSink {
    T* output;
    float* part;
    float2* max_sum;

    __device__ RowSink(const SharedPrefixAttentionParams& p, const ItemSlot& slot, int row) {
        const int group = p.num_heads / p.num_kv_heads;
        const int2 member = slot.members[row / group];  // request, part
        const int head = slot.item.kv_head * group + row % group;
        const bool whole = member.y < 0;
        output =
            whole ? static_cast<T*>(p.output) + (size_t(member.x) * p.num_heads + head) * kHeadDim : nullptr;
        const size_t index = size_t(whole ? 0 : member.y) * p.num_heads + head;
        part = p.part_output + index * kHeadDim;
        max_sum = p.part_max_sum + index;
    }
    __device__ void store_pair(int dim, float first, float second, float inverse_sum) const {
        if (output) {
            *reinterpret_cast<uint32_t*>(output + dim) =
                Packed<T>::pack(first * inverse_sum, second * inverse_sum);
        } else {
            __stcg(reinterpret_cast<float2*>(part + dim), make_float2(first, second));
        }
    }
};

}  // namespace parrot
