// The work list of SharedPrefixAttention, its parameters, and where a row's result goes; see
// shared_prefix_attention.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/instructions.cuh"

namespace parrot {

constexpr int kBlockTokens = 16;  // KV slots in a cache block
constexpr int kTileTokens = 64;   // tokens of one pipeline stage
constexpr int kWarps = 4;         // warps of a thread block that compute; one more loads
constexpr int kThreads = 32 * kWarps;
// A loading warp follows the computing warps. On Hopper it stands in a warp group of its own, which gives its
// registers to the computing one; the launcher reads the block size off the compiled kernel.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int kBlockThreads = 2 * kThreads;
#else
constexpr int kBlockThreads = kThreads + 32;
#endif
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
    int32_t* next_work;    // [2], zero before and after
    int32_t num_requests;  // rows of the merge; those without parts in the plan are skipped
    int32_t max_blocks;
    int32_t num_heads;
    int32_t num_kv_heads;
    float scale_log2;  // softmax scale times log2(e)
};

// Waits for the computing warps only.
__device__ inline void sync_computing() { asm volatile("bar.sync 1, %0;\n" ::"n"(kThreads) : "memory"); }

// One work item: an entry for one KV head, with what its threads need to find rows and tokens.
struct WorkItem {
    int kv_head;
    int representative;  // request whose block table names the blocks of [begin, end); the first member
    int begin;
    int end;
    int first_member;
    int num_members;
    int part;      // of the first member
    int num_rows;  // row r is query head r % group of member r / group

    __device__ int first_token() const { return begin / kBlockTokens * kBlockTokens; }

    // Request and part of a member; an entry of one request needs no look-up.
    __device__ int2 member(const SharedPrefixAttentionParams& p, int index) const {
        if (num_members == 1) return make_int2(representative, part);
        return reinterpret_cast<const int2*>(p.members)[first_member + index];
    }
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

    __device__ RowSink(const SharedPrefixAttentionParams& p, const WorkItem& item, int row) {
        const int group = p.num_heads / p.num_kv_heads;
        const int2 member = item.member(p, row / group);  // request, part
        const int head = item.kv_head * group + row % group;
        const bool whole = member.y < 0;
        output =
            whole ? static_cast<T*>(p.output) + (size_t(member.x) * p.num_heads + head) * kHeadDim : nullptr;
        const size_t slot = size_t(whole ? 0 : member.y) * p.num_heads + head;
        part = p.part_output + slot * kHeadDim;
        max_sum = p.part_max_sum + slot;
    }
    __device__ void store_pair(int dim, float first, float second, float sum) const {
        if (output) {
            *reinterpret_cast<uint32_t*>(output + dim) = Packed<T>::pack(first / sum, second / sum);
        } else {
            __stcg(reinterpret_cast<float2*>(part + dim), make_float2(first, second));
        }
    }
};

// Merges the parts of one request and head: a thread block each, its warps take turns at the parts and a lane
// has kHeadDim / 32 dims.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    merge_parts_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    constexpr int kDims = kHeadDim / 32;
    constexpr int kInFlight = 4;
    __shared__ float values[kWarps][kHeadDim];
    __shared__ float sums[kWarps];
    const int request = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int begin = p.part_begin[request], end = p.part_begin[request + 1];
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
    if (end - begin < 2) return;
    const float2* max_sum = p.part_max_sum + head;
    const float* part_output = p.part_output + size_t(head) * kHeadDim + lane * kDims;
    float top = -INFINITY;
    for (int part = begin + lane; part < end; part += 32) {
        top = fmaxf(top, __ldcg(max_sum + size_t(part) * p.num_heads).x);
    }
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    float value[kDims] = {}, sum = 0.0f;
    for (int first = begin + warp; first < end; first += kWarps * kInFlight) {
        float2 stats[kInFlight];
        float2 pairs[kInFlight][kDims / 2];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const int part = min(first + i * kWarps, end - 1);
            stats[i] = __ldcg(max_sum + size_t(part) * p.num_heads);
            const float2* source =
                reinterpret_cast<const float2*>(part_output + size_t(part) * p.num_heads * kHeadDim);
#pragma unroll
            for (int d = 0; d < kDims / 2; ++d) pairs[i][d] = __ldcg(source + d);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const float weight = first + i * kWarps < end ? exp2_fast(stats[i].x - top) : 0.0f;
            sum += weight * stats[i].y;
#pragma unroll
            for (int d = 0; d < kDims / 2; ++d) {
                value[2 * d] += weight * pairs[i][d].x;
                value[2 * d + 1] += weight * pairs[i][d].y;
            }
        }
    }
#pragma unroll
    for (int d = 0; d < kDims; ++d) values[warp][lane * kDims + d] = value[d];
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x < kHeadDim) {
        float total = 0.0f, total_sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            total += values[w][threadIdx.x];
            total_sum += sums[w];
        }
        static_cast<T*>(p.output)[(size_t(request) * p.num_heads + head) * kHeadDim + threadIdx.x] =
            Packed<T>::from_float(total / total_sum);
    }
}

}  // namespace parrot
