// The inner parts of packed linear layers, one table per instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/isa.h"

namespace parrot::cpu {

inline constexpr int kTileColumns = 32;  // outputs of one tile of a packed weight
inline constexpr int kMaxPanelRows = 12;

inline constexpr int kStepBytes = 128;  // of a tile, which kernels read in one step

// What to fetch from memory meanwhile: at each step the lines at `address`, which then moves on by `step`
// bytes. The hardware's own prefetcher stops at page ends and does not keep a core supplied that also
// multiplies (measured at 8 rows from memory: 7.7 GB/s without, 12.6 with).
struct Ahead {
    const void* address;
    int64_t step;
};

// panel [depth][rows]: inputs, fp32, or pairs of bf16 (depth / 2 of them) where `bf16_pairs` says so
// tile [depth][32] fp32, or [depth / 2][32][2] bf16; depth is even for bf16
// sums [rows][32]: what they multiply to
using TileKernel = void (*)(const void* panel, const void* tile, int64_t depth, const Ahead& ahead,
                            float* sums);

struct LinearKernels {
    int max_rows;            // of a panel, <= kMaxPanelRows
    bool bf16_pairs;         // how the bf16 kernels want their panels
    const TileKernel* fp32;  // [max_rows], for 1 .. max_rows rows
    const TileKernel* bf16;

    // sum over x[0, n) of x^2
    float (*sum_squares)(const float* x, int64_t n);
    // y[i] = x[i] * scale * weight[i]
    void (*scale)(const float* x, float scale, const float* weight, float* y, int64_t n);
    // bits[i] = x[i] rounded to bf16
    void (*round)(const float* x, int64_t n, uint16_t* bits);
    // to[i * rows + r] = x[r][i] for i below count: words of 32 bits
    void (*interleave)(const float* const* x, int64_t rows, int64_t count, float* to);
    // out [rows][16] = silu(gate) * up, for sums [rows][32] of 16 gates and 16 ups
    void (*silu_mul)(const float* sums, int64_t rows, float* out);
};

extern const LinearKernels kLinearScalar, kLinearAvx2, kLinearAvx512, kLinearAvx512Bf16;

}  // namespace parrot::cpu
