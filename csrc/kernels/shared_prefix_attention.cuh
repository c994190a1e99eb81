// SharedPrefixAttention: decode attention over a tree of shared prefixes (paper section 5.3).
//
// One persistent launch runs a flat work list. An entry is a range of tokens in the KV cache and the requests
// (members) that all attend to it; each of its K/V tiles is read from memory once and multiplied with the
// queries of every member on tensor cores. A second, small launch merges the partial results of each request
// in the fixed order of its parts, so that a given plan always gives the same bits; it is launched early
// (programmatic dependent launch) and waits on the device. Compiles with CUDA headers alone; checks live in
// the .cu file.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"
#include "kernels/row_tile.cuh"
#include "kernels/shared_prefix_work.cuh"

namespace parrot {

// Reads the K and V pages of one tile of an item into a pipeline stage, whole pages at a time; one warp.
// `filled` is completed when all bytes are there.
template <typename T, int kHeadDim>
__device__ inline void load_tile(const SharedPrefixAttentionParams& p, const WorkItem& item, int position,
                                 uint32_t stage, uint32_t filled) {
    constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
    const int lane = threadIdx.x % 32;
    const int32_t* table =
        p.block_tables + size_t(item.representative) * p.max_blocks + position / kBlockTokens;
    const int num_pages = min(kTileTokens, item.end - position + kBlockTokens - 1) / kBlockTokens;
#if __CUDA_ARCH__ >= 900
    constexpr int kHalves = kHeadDim / 64;
    if (lane == 0) {
        const int bytes = num_pages * kBlockTokens * kHeadDim * 2 * 2;
        asm volatile(
            "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }\n" ::"r"(filled),
            "r"(bytes)
            : "memory");
    }
    __syncwarp();
    const int page = lane / (2 * kHalves), half = lane / 2 % kHalves, is_value = lane % 2;
    if (page < num_pages) {
        const uint32_t target = stage + is_value * kTileBytes + half * kHalfBytes + page * kBlockTokens * 128;
        const void* map = is_value ? &p.value_map : &p.key_map;
        const int column = item.kv_head * kHeadDim + half * 64, row = table[page] * kBlockTokens;
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
            "%4}], [%2];\n" ::"r"(target),
            "l"(map), "r"(filled), "r"(column), "r"(row)
            : "memory");
    }
#else
    constexpr int kChunks = kHeadDim / 8;
    const size_t token_stride = size_t(p.num_kv_heads) * kHeadDim;
    const int chunk = lane % kChunks;
    const T* keys = static_cast<const T*>(p.key_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
    const T* values = static_cast<const T*>(p.value_cache) + size_t(item.kv_head) * kHeadDim + chunk * 8;
    for (int row = lane / kChunks; row < num_pages * kBlockTokens; row += 32 / kChunks) {
        const size_t offset =
            (size_t(table[row / kBlockTokens]) * kBlockTokens + row % kBlockTokens) * token_stride;
        const uint32_t target = stage + RowTile<T, kHeadDim>::tile_offset(row, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target), "l"(keys + offset)
                     : "memory");
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target + kTileBytes),
                     "l"(values + offset)
                     : "memory");
    }
    __threadfence_block();
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(filled) : "memory");
#endif
}

template <int kHeadDim, int kStages>
constexpr int shared_bytes() {
    return 1024 + kStages * 2 * kTileTokens * kHeadDim * 2;
}

// The stages between the loading warp and the computing warps.
template <int kStages>
struct Pipeline {
    uint64_t filled[kStages];   // completed when a stage's tile has arrived
    uint64_t drained[kStages];  // completed when all computing warps are done with it
    int work[kStages];          // work item of the tile in the stage, -1: no more

    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        constexpr int kLoadArrivals = 1;
#else
        constexpr int kLoadArrivals = 32;
#endif
        for (int s = 0; s < kStages; ++s) {
            barrier_init(shared_address(&filled[s]), kLoadArrivals);
            barrier_init(shared_address(&drained[s]), kWarps);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
    }
};

// Brings what the first item of this block needs into the cache: the plan is older than the kernel before
// this one, so that it may be read while that kernel still runs.
__device__ inline void prefetch_plan(const SharedPrefixAttentionParams& p) {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x % 32 == 0) {
        asm volatile("prefetch.tensormap [%0];\n" ::"l"(&p.key_map) : "memory");
        asm volatile("prefetch.tensormap [%0];\n" ::"l"(&p.value_map) : "memory");
    }
    if (int(blockIdx.x) >= *p.num_entries * p.num_kv_heads) return;
    const WorkItem item = read_work(p, blockIdx.x);
    const int page = item.begin / kBlockTokens + threadIdx.x % 32;
    if (page * kBlockTokens < item.end) {
        const int32_t* entry = p.block_tables + size_t(item.representative) * p.max_blocks + page;
        asm volatile("prefetch.global.L1 [%0];\n" ::"l"(entry) : "memory");
    }
#endif
}

// The loading warp: claims work items and streams their tiles through the stages, always as far ahead as
// there are stages, across the borders of items.
template <typename T, int kHeadDim, int kStages>
__device__ inline void load_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                 uint32_t stages) {
    constexpr int kStageBytes = 2 * kTileTokens * kHeadDim * 2;
    const int total = *p.num_entries * p.num_kv_heads, lane = threadIdx.x % 32;
    int stage = 0;
    uint32_t parity = 1;  // a fresh barrier counts as drained
    const auto advance = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    for (int work = blockIdx.x; work < total;) {
        int next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(p.next_work, 1);
        const WorkItem item = read_work(p, work);
        for (int position = item.first_token(); position < item.end; position += kTileTokens) {
            barrier_wait(shared_address(&pipeline.drained[stage]), parity);
            if (lane == 0) pipeline.work[stage] = work;
            load_tile<T, kHeadDim>(p, item, position, stages + stage * kStageBytes,
                                   shared_address(&pipeline.filled[stage]));
            advance();
        }
        work = __shfl_sync(0xffffffff, next, 0);
    }
    barrier_wait(shared_address(&pipeline.drained[stage]), parity);
    if (lane == 0) pipeline.work[stage] = -1;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_arrive(shared_address(&pipeline.filled[stage]));
#else
    __syncwarp();
    barrier_arrive(shared_address(&pipeline.filled[stage]));
#endif
}

// The computing warps: one item after the other, its tiles in order.
template <typename T, int kHeadDim, int kStages>
__device__ inline void compute_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                    uint32_t stages) {
    constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
    const int first_row = threadIdx.x / 32 * kWarpRows;
    int stage = 0;
    uint32_t parity = 0;
    for (;;) {
        barrier_wait(shared_address(&pipeline.filled[stage]), parity);
        const int work = pipeline.work[stage];
        if (work < 0) return;
        const WorkItem item = read_work(p, work);
        RowTile<T, kHeadDim> tile;
        tile.load_query(p, item, first_row);
        for (int position = item.first_token(); position < item.end; position += kTileTokens) {
            barrier_wait(shared_address(&pipeline.filled[stage]), parity);
            const uint32_t keys = stages + stage * 2 * kTileBytes;
            tile.attend(keys, keys + kTileBytes, position, item, first_row < item.num_rows, p.scale_log2);
            __syncwarp();
            if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&pipeline.drained[stage]));
            if (++stage == kStages) {
                stage = 0;
                parity ^= 1;
            }
        }
        store_rows<T, kHeadDim>(p, item, tile, first_row);
    }
}

template <typename T, int kHeadDim, int kStages>
__global__ void __launch_bounds__(kBlockThreads, 2)
    shared_prefix_attention_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    extern __shared__ uint8_t memory[];
    __shared__ Pipeline<kStages> pipeline;
    uint8_t* stages =
        memory + (1024 - shared_address(memory) % 1024) % 1024;  // the swizzle repeats every 1024 bytes
    if (threadIdx.x == 0) pipeline.init();
    if (threadIdx.x / 32 == kWarps) prefetch_plan(p);
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
#endif
    __syncthreads();
    if (threadIdx.x >= kThreads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;\n");
#endif
        if (threadIdx.x < kThreads + 32) load_work<T, kHeadDim, kStages>(p, pipeline, shared_address(stages));
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;\n");
#endif
        compute_work<T, kHeadDim, kStages>(p, pipeline, shared_address(stages));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(p.next_work + 1, 1) == int(gridDim.x) - 1) {
            p.next_work[0] = 0;
            p.next_work[1] = 0;
        }
    }
}

}  // namespace parrot
