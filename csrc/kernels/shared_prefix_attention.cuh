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

// Reads the keys or values of one tile of an item into a slot, whole pages at a time; one warp. `filled` is
// completed when all bytes are there.
template <typename T, int kHeadDim>
__device__ inline void load_tile(const SharedPrefixAttentionParams& p, const WorkItem& item, int position,
                                 bool is_value, uint32_t slot, uint32_t filled) {
    const int lane = threadIdx.x % 32;
    const int32_t* table =
        p.block_tables + size_t(item.representative) * p.max_blocks + position / kBlockTokens;
    const int num_pages = min(kTileTokens, item.end - position + kBlockTokens - 1) / kBlockTokens;
#if __CUDA_ARCH__ >= 900
    constexpr int kHalves = kHeadDim / 64;
    const int page = lane / kHalves, half = lane % kHalves;
    if (lane == 0) {
        asm volatile(
            "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }\n" ::"r"(filled),
            "r"(num_pages * kBlockTokens * kHeadDim * 2)
            : "memory");
    }
    __syncwarp();
    if (page < num_pages) {
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, "
            "%4}], [%2];\n" ::"r"(slot + half * kHalfBytes + page * kBlockTokens * 128),
            "l"(is_value ? &p.value_map : &p.key_map), "r"(filled), "r"(item.kv_head * kHeadDim + half * 64),
            "r"(table[page] * kBlockTokens)
            : "memory");
    }
#else
    constexpr int kChunks = kHeadDim / 8;
    const size_t token_stride = size_t(p.num_kv_heads) * kHeadDim;
    const int chunk = lane % kChunks;
    const T* cache = static_cast<const T*>(is_value ? p.value_cache : p.key_cache);
    const T* column = cache + size_t(item.kv_head) * kHeadDim + chunk * 8;
    for (int row = lane / kChunks; row < num_pages * kBlockTokens; row += 32 / kChunks) {
        const size_t token = size_t(table[row / kBlockTokens]) * kBlockTokens + row % kBlockTokens;
        const uint32_t target = slot + RowTile<T, kHeadDim>::tile_offset(row, chunk);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(target),
                     "l"(column + token * token_stride)
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

// The slots between the loading warp and the computing warps: keys and values of a tile in turn.
template <int kStages>
struct Pipeline {
    static constexpr int kSlots = 2 * kStages;
    uint64_t filled[kSlots];   // completed when a slot's half tile has arrived
    uint64_t drained[kSlots];  // completed when all computing warps are done with it
    int work[kSlots];          // work item of the keys in the slot, -1: no more

    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        constexpr int kLoadArrivals = 1;
#else
        constexpr int kLoadArrivals = 32;
#endif
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(shared_address(&filled[s]), kLoadArrivals);
            barrier_init(shared_address(&drained[s]), kWarps);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
    }
    __device__ void wait_filled(int slot, uint32_t parity) const {
        barrier_wait(shared_address(&filled[slot]), parity);
    }
    // This warp is done with a slot.
    __device__ void release(int slot) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&drained[slot]));
    }
};

// The slot of a tile's keys, its values lie in the next one; and the parity that both complete.
template <int kSlots>
struct Cursor {
    int keys = 0;
    uint32_t parity = 0;

    __device__ int values() const { return keys + 1; }
    __device__ Cursor next() const {
        return keys + 2 == kSlots ? Cursor{0, parity ^ 1} : Cursor{keys + 2, parity};
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
    constexpr int kSlotBytes = kTileTokens * kHeadDim * 2;
    const int total = *p.num_entries * p.num_kv_heads, lane = threadIdx.x % 32;
    Cursor<2 * kStages> cursor{0, 1};  // a fresh barrier counts as drained
    const auto load = [&](const WorkItem& item, int position, int slot) {
        load_tile<T, kHeadDim>(p, item, position, slot % 2, stages + slot * kSlotBytes,
                               shared_address(&pipeline.filled[slot]));
    };
    for (int work = blockIdx.x; work < total;) {
        int next = 0;
        if (lane == 0) next = gridDim.x + atomicAdd(p.next_work, 1);
        const WorkItem item = read_work(p, work);
        for (int position = item.first_token(); position < item.end; position += kTileTokens) {
            barrier_wait(shared_address(&pipeline.drained[cursor.keys]), cursor.parity);
            if (lane == 0) pipeline.work[cursor.keys] = work;
            load(item, position, cursor.keys);
            barrier_wait(shared_address(&pipeline.drained[cursor.values()]), cursor.parity);
            load(item, position, cursor.values());
            cursor = cursor.next();
        }
        work = __shfl_sync(0xffffffff, next, 0);
    }
    barrier_wait(shared_address(&pipeline.drained[cursor.keys]), cursor.parity);
    if (lane == 0) pipeline.work[cursor.keys] = -1;
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_arrive(shared_address(&pipeline.filled[cursor.keys]));
#else
    __syncwarp();
    barrier_arrive(shared_address(&pipeline.filled[cursor.keys]));
#endif
}

// Computes one item. On Hopper a tile's softmax runs while the tensor cores multiply the values of the tile
// before it.
template <typename T, int kHeadDim, int kStages>
struct ItemRun {
    static constexpr uint32_t kSlotBytes = kTileTokens * kHeadDim * 2;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    static constexpr bool kWarpGroup = true;  // all warps take part in every product
#else
    static constexpr bool kWarpGroup = false;
#endif

    const SharedPrefixAttentionParams& p;
    const Pipeline<kStages>& pipeline;
    const WorkItem& item;
    const uint32_t slots;
    const bool active;  // this warp has rows
    Cursor<2 * kStages>& cursor;
    RowTile<T, kHeadDim>& tile;
    float scores[kTileTokens / 8][4];
    uint32_t weights[kTileTokens / 16][4];

    __device__ ItemRun(const SharedPrefixAttentionParams& params, const Pipeline<kStages>& shared_pipeline,
                       const WorkItem& work_item, uint32_t first_slot, Cursor<2 * kStages>& at,
                       RowTile<T, kHeadDim>& rows)
        : p(params),
          pipeline(shared_pipeline),
          item(work_item),
          slots(first_slot),
          active(int(threadIdx.x / 32 * kWarpRows) < work_item.num_rows),
          cursor(at),
          tile(rows) {}

    __device__ void begin_scores() {
        pipeline.wait_filled(cursor.keys, cursor.parity);
        if (kWarpGroup || active) tile.multiply_keys(scores, slots + cursor.keys * kSlotBytes);
    }
    __device__ void end_scores(int position) {
        pipeline.release(cursor.keys);
        if (active) tile.weigh(scores, position, item, p.scale_log2);
    }
    __device__ void begin_output(const Cursor<2 * kStages>& at, int position) {
        const uint32_t values = slots + at.values() * kSlotBytes;
        pipeline.wait_filled(at.values(), at.parity);
        if (tile.is_partial(position, item)) tile.clear_values(values, position, item);
        if (kWarpGroup || active) tile.multiply_values(weights, values);
    }

    __device__ void run() {
        int position = item.first_token();
        begin_scores();
        finish_products<0>();
        end_scores(position);
        for (; position + kTileTokens < item.end; position += kTileTokens) {
            const Cursor<2 * kStages> at = cursor;
            tile.pack_weights(weights, scores);
            cursor = cursor.next();
            begin_scores();
            begin_output(at, position);
            finish_products<1>();
            end_scores(position + kTileTokens);
            finish_products<0>();
            pipeline.release(at.values());
            if (active) tile.rescale();
        }
        tile.pack_weights(weights, scores);
        begin_output(cursor, position);
        finish_products<0>();
        pipeline.release(cursor.values());
        cursor = cursor.next();
    }
};

// The computing warps: one item after the other, its tiles in order.
template <typename T, int kHeadDim, int kStages>
__device__ inline void compute_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                    uint32_t stages) {
    const int first_row = threadIdx.x / 32 * kWarpRows;
    Cursor<2 * kStages> cursor;
    for (;;) {
        pipeline.wait_filled(cursor.keys, cursor.parity);
        const int work = pipeline.work[cursor.keys];
        if (work < 0) return;
        const WorkItem item = read_work(p, work);
        RowTile<T, kHeadDim> tile;
        tile.load_query(p, item, first_row);
        ItemRun<T, kHeadDim, kStages> run(p, pipeline, item, stages, cursor, tile);
        run.run();
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
