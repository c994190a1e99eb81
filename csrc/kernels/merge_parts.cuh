// Merges the partial results of SharedPrefixAttention; see shared_prefix_attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"
#include "kernels/shared_prefix_work.cuh"

namespace parrot {

constexpr int kMergeWarps = 8;  // of a thread block

// The sum of some partial results of one row; a lane has kDims consecutive dims of it.
template <int kDims>
struct PartSum {
    float value[kDims] = {};
    float sum = 0.0f;
    float top = -INFINITY;

    // Scales what has been added so far to a new maximum.
    __device__ void raise(float new_top) {
        const float factor = new_top == -INFINITY ? 1.0f : exp2_fast(top - new_top);
        top = new_top;
        sum *= factor;
#pragma unroll
        for (int d = 0; d < kDims; ++d) value[d] *= factor;
    }

    __device__ void add(const float (&part)[kDims], float weight) {
#pragma unroll
        for (int d = 0; d < kDims; ++d) value[d] += weight * part[d];
    }

    __device__ static void load(float (&part)[kDims], const float* source) {
        if constexpr (kDims == 4) {
            const float4 loaded = __ldcg(reinterpret_cast<const float4*>(source));
            part[0] = loaded.x, part[1] = loaded.y, part[2] = loaded.z, part[3] = loaded.w;
        } else {
            const float2 loaded = __ldcg(reinterpret_cast<const float2*>(source));
            part[0] = loaded.x, part[1] = loaded.y;
        }
    }

    // Adds the parts begin, begin + step, ... below end, all loads of eight of them under way at once.
    __device__ void add_parts(const SharedPrefixAttentionParams& p, int head, int begin, int end, int step) {
        constexpr int kInFlight = 8, kHeadDim = 32 * kDims;
        const int lane = threadIdx.x % 32;
        const float* source = p.part_output + size_t(head) * kHeadDim + lane * kDims;
        const size_t stride = size_t(p.num_heads) * kHeadDim;
        float parts[kInFlight][kDims];
        for (int first = begin; first < end; first += 32 * step) {  // a lane has the weight of one part
            const int last = min(first + 32 * step, end) - 1;
            const auto load_batch = [&](int at) {
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    load(parts[i], source + min(at + i * step, last) * stride);
                }
            };
            load_batch(first);
            const int own = first + lane * step;
            const float2 stats = own <= last ? __ldcg(p.part_max_sum + size_t(own) * p.num_heads + head)
                                             : make_float2(-INFINITY, 0.0f);
            raise(fmaxf(top, reduce(stats.x, [](float a, float b) { return fmaxf(a, b); })));
            const float weight = exp2_fast(stats.x - top);
            sum += reduce(weight * stats.y, [](float a, float b) { return a + b; });
            for (int at = first; at <= last; at += kInFlight * step) {
                if (at > first) load_batch(at);
#pragma unroll
                for (int i = 0; i < kInFlight; ++i) {
                    const float w = __shfl_sync(0xffffffff, weight, (at - first) / step + i);
                    if (at + i * step <= last) add(parts[i], w);
                }
            }
        }
    }

  private:
    template <typename Operation>
    __device__ static float reduce(float x, Operation operation) {
        for (int step = 16; step; step /= 2) x = operation(x, __shfl_xor_sync(0xffffffff, x, step));
        return x;
    }
};

// Merges the parts of each request and head, a row: p.merge_warps warps take turns at its parts, and the
// first of them adds what they have, always in the same order.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge_parts_kernel(const __grid_constant__ SharedPrefixAttentionParams p) {
    constexpr int kDims = kHeadDim / 32;
    __shared__ PartSum<kDims> others[kMergeWarps][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, turn = warp % p.merge_warps;
    const int row = (blockIdx.x * kMergeWarps + warp) / p.merge_warps;
    const int request = row / p.num_heads, head = row % p.num_heads;
    const bool is_row = request < p.num_requests;
    const int begin = is_row ? p.part_begin[request] : 0, end = is_row ? p.part_begin[request + 1] : 0;
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
    cudaGridDependencySynchronize();
#endif
    PartSum<kDims> total;
    if (end - begin > 1) total.add_parts(p, head, begin + turn, end, p.merge_warps);
    if (p.merge_warps > 1) {
        others[warp][lane] = total;
        __syncthreads();
    }
    if (turn > 0 || end - begin < 2) return;
    for (int other = warp + 1; other < warp + p.merge_warps; ++other) {
        const PartSum<kDims>& added = others[other][lane];
        total.raise(fmaxf(total.top, added.top));
        const float weight = exp2_fast(added.top - total.top);
        total.sum += weight * added.sum;
        total.add(added.value, weight);
    }
    const float inverse_sum = 1.0f / total.sum;
    uint32_t* target =
        reinterpret_cast<uint32_t*>(static_cast<T*>(p.output) + size_t(row) * kHeadDim) + lane * (kDims / 2);
#pragma unroll
    for (int d = 0; d < kDims / 2; ++d) {
        target[d] = Packed<T>::pack(total.value[2 * d] * inverse_sum, total.value[2 * d + 1] * inverse_sum);
    }
}

}  // namespace parrot
