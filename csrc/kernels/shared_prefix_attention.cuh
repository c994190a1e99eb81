// SharedPrefixAttention: decode attention over a tree of shared prefixes (paper section 5.3).
//
// One persistent launch runs a flat work list. An entry is a range of tokens in the KV cache and the requests
// (members) that all attend to it; each of its K/V tiles is read from memory once and multiplied with the
// queries of every member on tensor cores. A second, small launch (merge_parts.cuh) merges the partial
// results of each request in the fixed order of its parts, so that a given plan always gives the same bits.
// Both are launched early (programmatic dependent launch) and wait on the device. Compiles with CUDA headers
// alone; checks live in the .cu file.
//
// What may still be under way when work begins: the one kernel ahead in the stream. It must write neither the
// plan nor a block that two requests share; their own blocks, the query and the partial results are only
// touched after it has ended.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"
#include "kernels/row_tile.cuh"
#include "kernels/shared_prefix_loader.cuh"
#include "kernels/shared_prefix_work.cuh"

namespace parrot {

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
    using SlotCursor = Cursor<2 * kStages>;

    const SharedPrefixAttentionParams& p;
    const Pipeline<kStages>& pipeline;
    const WorkItem& item;
    const uint32_t slots;
    const bool active;  // this warp has rows
    SlotCursor& cursor;
    RowTile<T, kHeadDim>& tile;
    float scores[kTileTokens / 8][4];
    uint32_t weights[kTileTokens / 16][4];

    __device__ ItemRun(const SharedPrefixAttentionParams& params, const Pipeline<kStages>& shared_pipeline,
                       const WorkItem& work_item, uint32_t first_slot, SlotCursor& at,
                       RowTile<T, kHeadDim>& rows)
        : p(params),
          pipeline(shared_pipeline),
          item(work_item),
          slots(first_slot),
          active(int(threadIdx.x / 32 * kWarpRows) < work_item.num_rows),
          cursor(at),
          tile(rows) {}

    // Both return the slot that their product reads.
    __device__ int begin_scores() {
        const SlotCursor at = cursor.take();
        pipeline.wait_filled(at.slot, at.parity);
        if (kWarpGroup || active) tile.multiply_keys(scores, slots + at.slot * kSlotBytes);
        return at.slot;
    }
    __device__ int begin_output(int position) {
        const SlotCursor at = cursor.take();
        const uint32_t values = slots + at.slot * kSlotBytes;
        pipeline.wait_filled(at.slot, at.parity);
        if (tile.is_partial(position, item)) tile.clear_values(values, position, item);
        if (kWarpGroup || active) tile.multiply_values(weights, values);
        return at.slot;
    }
    __device__ void end_scores(int key_slot, int position) {
        pipeline.release(key_slot);
        if (active) tile.weigh(scores, position, item, p.scale_log2);
    }

    __device__ void run() {
        int position = item.first_token();
        int key_slot = begin_scores();
        finish_products<0>();
        end_scores(key_slot, position);
        for (; position + kTileTokens < item.end; position += kTileTokens) {
            pack_weights<T>(weights, scores);
            key_slot = begin_scores();
            const int value_slot = begin_output(position);
            finish_products<1>();
            end_scores(key_slot, position + kTileTokens);
            finish_products<0>();
            pipeline.release(value_slot);
            if (active) tile.softmax.rescale(tile.output);
        }
        pack_weights<T>(weights, scores);
        const int value_slot = begin_output(position);
        finish_products<0>();
        pipeline.release(value_slot);
    }
};

// The computing warps: one item after the other. The query of the next item is on its way
// while the result of an item is written.
template <typename T, int kHeadDim, int kStages>
__device__ inline void compute_work(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline,
                                    uint32_t stages) {
    const int first_row = threadIdx.x / 32 * kWarpRows;
    Cursor<2 * kStages> cursor;
    Cursor<Pipeline<kStages>::kItems> at;
    RowTile<T, kHeadDim> tile;
    barrier_wait(shared_address(&pipeline.item_filled[at.slot]), at.parity);
    tile.load_query(p, pipeline.items[at.slot], first_row);
    for (;;) {
        const ItemSlot& slot = pipeline.items[at.slot];
        const WorkItem item = slot.item;
        if (item.kv_head < 0) return;
        tile.clear();
        ItemRun<T, kHeadDim, kStages> run(p, pipeline, item, stages, cursor, tile);
        run.run();
        const int done = at.slot;
        at.advance();
        barrier_wait(shared_address(&pipeline.item_filled[at.slot]), at.parity);
        tile.load_query(p, pipeline.items[at.slot], first_row);
        store_rows<T, kHeadDim>(p, slot, tile, first_row);
        pipeline.release_item(done);
    }
}

// Two blocks share a multiprocessor where registers can move from the loading to the computing warps, or few
// are needed.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
template <int kHeadDim>
constexpr int kMinBlocks = 2;
#else
template <int kHeadDim>
constexpr int kMinBlocks = kHeadDim <= 64 ? 2 : 1;
#endif

template <typename T, int kHeadDim, int kStages>
__global__ void __launch_bounds__(kBlockThreads, kMinBlocks<kHeadDim>)
    shared_prefix_attention_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    extern __shared__ uint8_t memory[];
    __shared__ Pipeline<kStages> pipeline;
    // The swizzle repeats every 1024 bytes.
    uint8_t* stages = memory + (1024 - shared_address(memory) % 1024) % 1024;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    if (threadIdx.x >= kThreads) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 56;\n");
#endif
        Loader<T, kHeadDim, kStages>(p, pipeline, shared_address(stages)).run();
    } else {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 200;\n");
#endif
        wait_for_kernel_ahead();
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
