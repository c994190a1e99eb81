// Paged prefill: causal attention of chunks of prefill over a paged cache, for Hopper (sm_90a).
//
// An item is a tile of 128 rows of a chunk for one query head. A persistent thread block computes one item
// after the other: two warp groups have 64 rows each, and read tiles of 128 tokens of K and V that the warps
// of a third one load by bulk copies, always as far ahead as there are stages. The softmax of a tile runs
// while the tensor cores multiply the values of the tile before it. Blocks claim items in order, so those
// with the most to read come first; the items of some heads at a time, so that their K and V stay in the L2.
#pragma once

#include <cstdint>

#include "kernels/cursor.cuh"
#include "kernels/instructions.cuh"
#include "kernels/paged_prefill_loader.cuh"
#include "kernels/paged_prefill_work.cuh"
#include "kernels/softmax.cuh"

namespace parrot::prefill {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A computing warp group: 64 rows of each item.
template <typename T, int kHeadDim>
class RowGroup {
  public:
    __device__ RowGroup(const Params& p, Pipeline<kHeadDim>& pipeline, uint32_t memory)
        : p_(p),
          pipeline_(pipeline),
          query_(matrix_descriptor(memory + group() * kGroupRows * 128, kColumnBytes)),
          keys_(memory + kTileBytes<kHeadDim>),
          values_(memory + (1 + kStages<kHeadDim>)*kTileBytes<kHeadDim>) {}

    __device__ void run() {
        for (;;) {
            pipeline_.items.wait_filled(item_at_);
            const Item item = pipeline_.item[item_at_.slot];
            pipeline_.items.release_thread(item_at_.slot);
            item_at_.advance();
            if (item.head < 0) return;
            const int first = item.position + group() * kGroupRows;
            const int end = min(item.end(), first + kGroupRows);
            const int tiles = end > first ? (end - 1) / kTokens + 1 : 0;  // that these rows see
            for (int tile = item.num_tiles(); tile > tiles; --tile) skip_tile();
            pipeline_.query.wait_filled(query_at_);
            if (tiles > 0) {
                compute(tiles, first);
                store(item);
            } else {
                pipeline_.query.release(0);
            }
            query_at_.advance();
        }
    }

  private:
    __device__ static int group() { return int(uniform(threadIdx.x / 128)); }
    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp_row() { return threadIdx.x / 32 % 4 * 16; }

    __device__ void skip_tile() {
        pipeline_.keys.wait_filled(key_at_);
        pipeline_.keys.release(key_at_.slot);
        key_at_.advance();
        pipeline_.values.wait_filled(value_at_);
        pipeline_.values.release(value_at_.slot);
        value_at_.advance();
    }

    // `first`: position of the first row.
    __device__ void compute(int tiles, int first) {
        softmax_.clear();
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            for (int i = 0; i < 4; ++i) output_[n][i] = 0.0f;
        }
        begin_scores();
        finish_products<0>();
        end_scores(tiles - 1, first);
        pipeline_.values.wait_filled(value_at_);
        for (int tile = tiles - 2; tile >= 0; --tile) {
            pack_weights<T>(weights_, scores_);
            begin_scores();
            begin_output();
            finish_products<1>();
            end_scores(tile, first);
            // The next values are waited for here because the wait is a branch: the compiler moves the end of
            // a product that stands in one block with the softmax ahead of it, and this one has to follow it.
            const int values = value_at_.slot;
            value_at_.advance();
            pipeline_.values.wait_filled(value_at_);
            end_output(values);
            softmax_.rescale(output_);
        }
        pack_weights<T>(weights_, scores_);
        begin_output();
        end_output(value_at_.slot);
        value_at_.advance();
    }

    __device__ void begin_scores() {
        pipeline_.keys.wait_filled(key_at_);
        const uint64_t keys = matrix_descriptor(keys_ + key_at_.slot * kTileBytes<kHeadDim>, kColumnBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            const uint64_t step = (k / 4 * kColumnBytes + k % 4 * 32) / 16;
            wgmma<T>(scores_, query_ + step, keys + step, k > 0);
        }
        wgmma_commit();
    }

    __device__ void begin_output() {
        const uint64_t values =
            matrix_descriptor(values_ + value_at_.slot * kTileBytes<kHeadDim>, kColumnBytes);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTokens / 16; ++n) {
            wgmma<T, true>(output_, weights_[n], values + n * 16 * 128 / 16, 1);
        }
        wgmma_commit();
    }

    // Scores become weights; only the tiles that end past the first row's token have to be masked.
    __device__ void end_scores(int tile, int first) {
        pipeline_.keys.release(key_at_.slot);
        key_at_.advance();
        if (tile == 0) pipeline_.query.release(0);
        if ((tile + 1) * kTokens - 1 > first) mask(first - tile * kTokens);
        softmax_.step(scores_, p_.scale_log2);
    }

    __device__ void end_output(int slot) {
        finish_products<0>();
        pipeline_.values.release(slot);
    }

    // `first`: the first row's token, counted from the tile's first one.
    __device__ void mask(int first) {
        const int last = first + warp_row() + lane() / 4 - lane() % 4 * 2;
#pragma unroll
        for (int n = 0; n < kTokens / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (n * 8 + i % 2 > last + i / 2 * 8) scores_[n][i] = -INFINITY;
            }
        }
    }

    __device__ void store(const Item& item) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float inverse = 1.0f / softmax_.total(half);
            const int row = group() * kGroupRows + warp_row() + lane() / 4 + 8 * half;
            if (row >= item.num_rows) continue;
            T* output = static_cast<T*>(p_.output) +
                        (size_t(item.first_row + row) * p_.num_heads + item.head) * kHeadDim + lane() % 4 * 2;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<uint32_t*>(output + n * 8) =
                    Packed<T>::pack(output_[n][2 * half] * inverse, output_[n][2 * half + 1] * inverse);
            }
        }
    }

    const Params& p_;
    Pipeline<kHeadDim>& pipeline_;
    const uint64_t query_;  // described as the left operand
    const uint32_t keys_, values_;
    Cursor<kStages<kHeadDim>> key_at_, value_at_;
    Cursor<kItems> item_at_;
    Cursor<1> query_at_;
    OnlineSoftmax softmax_;
    float scores_[kTokens / 8][4];
    uint32_t weights_[kTokens / 16][4];
    float output_[kHeadDim / 8][4];
};

#endif

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads, 1) paged_prefill_kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ uint8_t memory[];
    __shared__ Pipeline<kHeadDim> pipeline;
    // The swizzle repeats every 1024 bytes.
    const uint32_t aligned = (shared_address(memory) + 1023) / 1024 * 1024;
    if (threadIdx.x == 0) pipeline.init();
    __syncthreads();
    if (threadIdx.x < 128 * kGroups) {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;\n");
        RowGroup<T, kHeadDim>(p, pipeline, aligned).run();
    } else {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 64;\n");
        const int warp = threadIdx.x / 32 - kComputingWarps;
        if (warp < kPageLoaders) {
            Loader<T, kHeadDim, false>(p, pipeline, aligned).run();
        } else if (warp < 2 * kPageLoaders) {
            Loader<T, kHeadDim, true>(p, pipeline, aligned).run();
        }
    }
#endif
}

}  // namespace parrot::prefill
