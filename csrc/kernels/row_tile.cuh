// The arithmetic of SharedPrefixAttention: 64 query rows against tiles of 64 tokens, by wgmma on Hopper and
// by mma.sync elsewhere; see shared_prefix_attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"
#include "kernels/shared_prefix_work.cuh"

namespace parrot {

// The query rows of an item and their running result. The four computing warps hold 16 rows each; a thread
// has rows lane / 4 and lane / 4 + 8 of its warp.
template <typename T, int kHeadDim>
struct RowTile {
    uint32_t query[kHeadDim / 16][4];
    float output[kHeadDim / 64][8][4];
    float row_max[2];
    float row_sum[2];

    __device__ void load_query(const SharedPrefixAttentionParams& p, const WorkItem& item, int first_row) {
        const int lane = threadIdx.x % 32, group = p.num_heads / p.num_kv_heads;
        const uint32_t* rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + lane / 4 + 8 * half;
            rows[half] = nullptr;
            if (row < item.num_rows) {
                const int request = item.member(p, row / group).x;
                const int head = item.kv_head * group + row % group;
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
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            for (int i = 0; i < 4; ++i) output[n / 8][n % 8][i] = 0.0f;
        }
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
    }

    // Online softmax over one tile, whose first token has the absolute position `position`; positions outside
    // [begin, end) are masked. All computing warps call this; `active`: this one has rows.
    __device__ void attend(uint32_t keys, uint32_t values, int position, const WorkItem& item, bool active,
                           float scale_log2) {
        const int lane = threadIdx.x % 32;
        const bool partial = position < item.begin || position + kTileTokens > item.end;
        if (partial) clear_values(values, position, item);
#if __CUDA_ARCH__ < 900
        if (!active) return;
#endif
        float scores[kTileTokens / 8][4];
        multiply_keys(scores, keys);
        uint32_t weights[kTileTokens / 16][4] = {};
        if (active) {
            if (partial) {
#pragma unroll
                for (int n = 0; n < kTileTokens / 8; ++n) {
                    for (int i = 0; i < 4; ++i) {
                        const int at = position + n * 8 + (lane % 4) * 2 + i % 2;
                        if (at < item.begin || at >= item.end) scores[n][i] = -INFINITY;
                    }
                }
            }
            softmax_step(scores, scale_log2);
#pragma unroll
            for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = &scores[2 * n + i / 2][i % 2 * 2];
                    weights[n][i] = Packed<T>::pack(pair[0], pair[1]);
                }
            }
        }
        multiply_values(weights, values);
    }

    // Byte offset of 16-byte chunk `chunk` of a row: columns of 128 bytes, in which chunks are swizzled so
    // that the eight rows of a matrix lie in different banks (the hardware's 128-byte swizzle).
    static __device__ uint32_t tile_offset(int row, int chunk) {
        return chunk / 8 * kHalfBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
    }

  private:
    // Zeroes the V rows outside [begin, end): whole pages were loaded, and what unused slots hold, NaN
    // perhaps, must not reach the product, where even a zero weight would spread it.
    __device__ void clear_values(uint32_t values, int position, const WorkItem& item) {
        for (int index = threadIdx.x; index < kTileTokens * (kHeadDim / 8); index += kThreads) {
            const int row = index / (kHeadDim / 8), chunk = index % (kHeadDim / 8);
            if (position + row >= item.begin && position + row < item.end) continue;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(values + tile_offset(row, chunk)),
                         "r"(0)
                         : "memory");
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
#endif
        sync_computing();
    }

    __device__ void multiply_keys(float (&scores)[kTileTokens / 8][4], uint32_t keys) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kHeadDim / 16; ++k) {
            wgmma<T, false>(scores, query[k], matrix_descriptor(keys + k / 4 * kHalfBytes + k % 4 * 32),
                            k > 0);
        }
        wgmma_finish();
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

    __device__ void multiply_values(const uint32_t (&weights)[kTileTokens / 16][4], uint32_t values) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
            for (int half = 0; half < kHeadDim / 64; ++half) {
                wgmma<T, true>(output[half], weights[n],
                               matrix_descriptor(values + half * kHalfBytes + n * 16 * 128), 1);
            }
        }
        wgmma_finish();
#else
        const int lane = threadIdx.x % 32;
        const uint32_t value_lane = values + tile_offset(lane % 16, lane / 16);
#pragma unroll
        for (int n = 0; n < kTileTokens / 16; ++n) {
#pragma unroll
            for (int d = 0; d < kHeadDim / 16; ++d) {
                uint32_t b[4];
                load_matrices_transposed(b, (value_lane ^ (d % 4 * 32)) + d / 4 * kHalfBytes + n * 16 * 128);
                Packed<T>::mma(output[d / 4][d % 4 * 2], weights[n], b[0], b[1]);
                Packed<T>::mma(output[d / 4][d % 4 * 2 + 1], weights[n], b[2], b[3]);
            }
        }
#endif
    }

    // Turns scores into weights relative to the new running max, and rescales what came before.
    __device__ void softmax_step(float (&scores)[kTileTokens / 8][4], float scale_log2) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = -INFINITY;
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
                top = fmaxf(top, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, 2));
            const float new_max = fmaxf(row_max[half], top * scale_log2);
            // All tokens so far masked: keep exp2 away from inf - inf.
            const float base = new_max == -INFINITY ? 0.0f : new_max;
            const float factor = exp2_fast(row_max[half] - base);
            row_max[half] = new_max;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_fast(fmaf(scores[n][i], scale_log2, -base));
                    sum += scores[n][i];
                }
            }
            sum += __shfl_xor_sync(0xffffffff, sum, 1);
            sum += __shfl_xor_sync(0xffffffff, sum, 2);
            row_sum[half] = row_sum[half] * factor + sum;
            if (__any_sync(0xffffffff, factor != 1.0f)) {
#pragma unroll
                for (int n = 0; n < kHeadDim / 8; ++n) {
                    output[n / 8][n % 8][2 * half] *= factor;
                    output[n / 8][n % 8][2 * half + 1] *= factor;
                }
            }
        }
    }
};

// Writes the rows of this warp.
template <typename T, int kHeadDim>
__device__ inline void store_rows(const SharedPrefixAttentionParams& p, const WorkItem& item,
                                  const RowTile<T, kHeadDim>& tile, int first_row) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= item.num_rows) continue;
        const RowSink<T, kHeadDim> sink(p, item, row);
        const float sum = tile.row_sum[half];
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            const float* pair = &tile.output[n / 8][n % 8][2 * half];
            sink.store_pair(n * 8 + (lane % 4) * 2, pair[0], pair[1], sum);
        }
        if (!sink.output && lane % 4 == 0) __stcg(sink.max_sum, make_float2(tile.row_max[half], sum));
    }
}

}  // namespace parrot
