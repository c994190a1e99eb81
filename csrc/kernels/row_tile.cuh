// The arithmetic of SharedPrefixAttention: 64 query rows against tiles of 64 tokens, by wgmma on Hopper and
// by mma.sync elsewhere; see shared_prefix_attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"
#include "kernels/shared_prefix_work.cuh"
#include "kernels/softmax.cuh"

namespace parrot {

// The query rows of an item and their running result. The four computing warps hold 16 rows each; a thread
// has rows lane / 4 and lane / 4 + 8 of its warp.
template <typename T, int kHeadDim>
struct RowTile {
    uint32_t query[kHeadDim / 16][4];
    float output[kHeadDim / 8][4];
    OnlineSoftmax softmax;

    __device__ void load_query(const SharedPrefixAttentionParams& p, const ItemSlot& slot, int first_row) {
        const int lane = threadIdx.x % 32, group = p.num_heads / p.num_kv_heads;
        const uint32_t* rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
            rows[half] = nullptr;
            if (row < slot.item.num_rows) {
                const int request = slot.members[row / group].x;
                const int head = slot.item.kv_head * group + row % group;
                rows[half] = reinterpret_cast<const uint32_t*>(
                    static_cast<const T*>(p.query) + (size_t(request) * p.num_heads + head) * kHeadDim);
            }
        }
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t* row = rows[i % 2];
                query[k][i] = row ? row[k * 8 + lane % 4 + (i / 2) * 4] : 0u;
            }
        }
    }

    __device__ void clear() {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            for (int i = 0; i < 4; ++i) output[n][i] = 0.0f;
        }
        softmax.clear();
    }

    // Scores of one tile's keys. On Hopper the product runs on while the caller does something else; it has
    // ended after finish_products().
    __device__ void multiply_keys(float (&scores)[kTileTokens / 8][4], uint32_t keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint64_t matrix = matrix_descriptor(keys, kHalfBytes);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            wgmma<T, false>(scores, query[k], matrix + (k / 4 * kHalfBytes + k % 4 * 32) / 16, k > 0);
        }
        wgmma_commit();
#else
        const int lane = threadIdx.x % 32;
        // Rows advance by 16 at a time, so that a lane's swizzle is fixed and only the chunk's bits flip.
        const uint32_t key_lane = keys + tile_offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; ++n) {
            for (int i = 0; i < 4; ++i) scores[n][i] = 0.0f;
        }
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
#pragma unroll
            for (int n = 0; n < kTileTokens / 16; ++n) {
                uint32_t b[4];
                load_matrices(b, (key_lane ^ (k % 4 * 32)) + k / 4 * kHalfBytes + n * 16 * 128);
                Packed<T>::mma(scores[2 * n], query[k], b[0], b[1]);
                Packed<T>::mma(scores[2 * n + 1], query[k], b[2], b[3]);
            }
        }
#endif
    }

    // One step of the online softmax: turns the scores of a tile, whose first token has the absolute position
    // `position`, into weights. Positions outside [begin, end) are masked. softmax.rescale() must follow,
    // once no product into the result is under way.
    __device__ void weigh(float (&scores)[kTileTokens / 8][4], int position, const WorkItem& item,
                          float scale_log2) {
        const int lane = threadIdx.x % 32;
        if (is_partial(position, item)) {
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
                for (int i = 0; i < 4; ++i) {
                    const int at = position + n * 8 + (lane % 4) * 2 + i % 2;
                    if (at < item.begin || at >= item.end) scores[n][i] = -INFINITY;
                }
            }
        }
        softmax.step(scores, scale_log2);
    }

    // Adds the product of the weights with one tile's values to the result; may run on like multiply_keys.
    __device__ void multiply_values(const uint32_t (&weights)[kTileTokens / 16][4], uint32_t values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        const uint64_t matrix = matrix_descriptor(values, kHalfBytes);
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
            wgmma<T, true>(output, weights[n], matrix + n * 16 * 128 / 16, 1);
        }
        wgmma_commit();
#else
        const int lane = threadIdx.x % 32;
        const uint32_t value_lane = values + tile_offset(lane % 16, lane / 16);
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, (value_lane ^ (d % 4 * 32)) + d / 4 * kHalfBytes + n * 16 * 128);
                Packed<T>::mma(output[2 * d], weights[n], b[0], b[1]);
                Packed<T>::mma(output[2 * d + 1], weights[n], b[2], b[3]);
            }
        }
#endif
    }

    static __device__ bool is_partial(int position, const WorkItem& item) {
        return position < item.begin || position + kTileTokens > item.end;
    }

    // Zeroes the V rows outside [begin, end): whole pages were loaded, and what unused slots hold, NaN
    // perhaps, must not reach the product, where even a zero weight would spread it. All computing warps call
    // this.
    static __device__ void clear_values(uint32_t values, int position, const WorkItem& item) {
        for (int index = threadIdx.x; index < kTileTokens * (kHeadDim / 8); index += kThreads) {
            const int row = index / (kHeadDim / 8), chunk = index % (kHeadDim / 8);
            if (position + row >= item.begin && position + row < item.end) continue;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(values + tile_offset(row, chunk)),
                         "r"(0)
                         : "memory");
        }
#if __CUDA_ARCH__ >= 900
        fence_shared_writes();
#endif
        sync_computing();
    }

    // Byte offset of 16-byte chunk `chunk` of a row: columns of 128 bytes, in which chunks are swizzled so
    // that the eight rows of a matrix lie in different banks (the hardware's 128-byte swizzle).
    static __device__ uint32_t tile_offset(int row, int chunk) {
        return chunk / 8 * kHalfBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    }
};

// Writes the rows of this warp.
template <typename T, int kHeadDim>
__device__ inline void store_rows(const SharedPrefixAttentionParams& p, const ItemSlot& slot,
                                  const RowTile<T, kHeadDim>& tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = tile.softmax.total(half);
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= slot.item.num_rows) continue;
        const RowSink<T, kHeadDim> sink(p, slot, row);
        const float inverse_sum = 1.0f / sum;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const float* pair = &tile.output[n][2 * half];
            sink.store_pair(n * 8 + (lane % 4) * 2, pair[0], pair[1], inverse_sum);
        }
        if (!sink.output && lane % 4 == 0) __stcg(sink.max_sum, make_float2(tile.softmax.row_max[half], sum));
    }
}

}  // namespace parrot
