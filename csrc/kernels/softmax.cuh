// The online softmax over tiles of scores that lie in registers as tensor cores leave them: a thread has two
// rows, lane / 4 and lane / 4 + 8 of its warp, and two neighbouring columns of every eight.
#pragma once

#include <cstdint>

#include "kernels/instructions.cuh"

namespace parrot {

struct OnlineSoftmax {
    float row_max[2];  // base 2
    float row_sum[2];  // of this thread's columns
    float factor[2];   // what the last step() asks the result so far to be multiplied by

    __device__ void clear() {
        row_max[0] = row_max[1] = -INFINITY;
        row_sum[0] = row_sum[1] = 0.0f;
        factor[0] = factor[1] = 1.0f;
    }

    // Turns scores into weights relative to the running max. It only moves when it rises by more than
    // kMaxSlack: until then weights exceed 1 but stay far inside half precision, and the result needs no
    // rescaling. rescale() must follow, once no product into the result is under way.
    template <int kColumns>
    __device__ void step(float (&scores)[kColumns][4], float scale_log2) {
        constexpr float kMaxSlack = 8.0f;
        float tops[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            // Two chains, here and in the sum: a single one takes as long as the products it hides behind.
            float chains[2];
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
                const float pair = fmaxf(scores[n][2 * half], scores[n][2 * half + 1]);
                chains[n % 2] = n < 2 ? pair : fmaxf(chains[n % 2], pair);
            }
            tops[half] = fmaxf(chains[0], chains[1]);
        }
#pragma unroll
        for (int step = 1; step < 4; step *= 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                tops[half] = fmaxf(tops[half], __shfl_xor_sync(0xffffffff, tops[half], step));
            }
        }
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float top = tops[half] * scale_log2;
            factor[half] = 1.0f;
            if (top > row_max[half] + kMaxSlack) {
                factor[half] = exp2_fast(row_max[half] - top);
                row_max[half] = top;
            }
            // All tokens so far masked: keep exp2 away from inf - inf.
            base[half] = row_max[half] == -INFINITY ? 0.0f : row_max[half];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float sums[4];
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& score = scores[n][2 * half + i];
                    score = exp2_fast(fmaf(score, scale_log2, -base[half]));
                    float& sum = sums[n % 2 * 2 + i];
                    sum = n < 2 ? score : sum + score;
                }
            }
            row_sum[half] = row_sum[half] * factor[half] + (sums[0] + sums[1]) + (sums[2] + sums[3]);
        }
    }

    // Multiplies the result so far by what the last step() asks for.
    template <int kColumns>
    __device__ void rescale(float (&output)[kColumns][4]) const {
        if (!__any_sync(0xffffffff, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) output[n][i] *= factor[i / 2];
        }
    }

    // The sum of a row, over the four threads that share it.
    __device__ float total(int half) const {
        float sum = row_sum[half];
        sum += __shfl_xor_sync(0xffffffff, sum, 1);
        sum += __shfl_xor_sync(0xffffffff, sum, 2);
        return sum;
    }
};

// Weights as the left operand of a product with values.
template <typename T, int kTokens>
__device__ inline void pack_weights(uint32_t (&weights)[kTokens][4], const float (&scores)[2 * kTokens][4]) {
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* pair = &scores[2 * n + i / 2][i % 2 * 2];
            weights[n][i] = Packed<T>::pack(pair[0], pair[1]);
        }
    }
}

}  // namespace parrot
