#if defined(__AVX512BF16__)
#include "kernels/cpu/interleave_avx512.h"
#include "kernels/cpu/linear_tile.h"
#include "kernels/cpu/linear_vector_avx512.h"

namespace parrot::cpu {
namespace {

// The sum of two products in one instruction; inputs are rounded to bf16 in pairs when panels are packed.
template <int kRows>
void tile_pairs(const void* panel, const void* tile, int64_t depth, const Ahead& next, float* sums) {
    const int32_t* x = static_cast<const int32_t*>(panel);
    const uint16_t* w = static_cast<const uint16_t*>(tile);
    const char* ahead = static_cast<const char*>(next.address);
    __m512 sum[kRows][2];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; k += 2, x += kRows, w += 2 * kTileColumns, ahead += next.step) {
        prefetch<V>(ahead);
        const auto left = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w));
        const auto right = reinterpret_cast<__m512bh>(_mm512_loadu_si512(w + kTileColumns));
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const auto input = reinterpret_cast<__m512bh>(_mm512_set1_epi32(x[r]));
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], input, left);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], input, right);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
        _mm512_storeu_ps(sums + r * kTileColumns, sum[r][0]);
        _mm512_storeu_ps(sums + r * kTileColumns + 16, sum[r][1]);
    }
}

void round(const float* x, int64_t n, uint16_t* bits) {
    for (int64_t i = 0; i < n; i += 16) {
        const auto keep = static_cast<__mmask16>(n - i < 16 ? (1U << (n - i)) - 1 : 0xffffU);
        const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(keep, x + i));
        _mm256_mask_storeu_epi16(bits + i, keep, reinterpret_cast<__m256i>(rounded));
    }
}

constexpr TileKernel kFp32[] = {tile_fp32<V, 1>, tile_fp32<V, 2>,  tile_fp32<V, 3>,  tile_fp32<V, 4>,
                                tile_fp32<V, 5>, tile_fp32<V, 6>,  tile_fp32<V, 7>,  tile_fp32<V, 8>,
                                tile_fp32<V, 9>, tile_fp32<V, 10>, tile_fp32<V, 11>, tile_fp32<V, 12>};
constexpr TileKernel kBf16[] = {tile_pairs<1>, tile_pairs<2>,  tile_pairs<3>,  tile_pairs<4>,
                                tile_pairs<5>, tile_pairs<6>,  tile_pairs<7>,  tile_pairs<8>,
                                tile_pairs<9>, tile_pairs<10>, tile_pairs<11>, tile_pairs<12>};

}  // namespace

const LinearKernels kLinearAvx512Bf16{
    .max_rows = 12,
    .bf16_pairs = true,
    .fp32 = kFp32,
    .bf16 = kBf16,
    .sum_squares = sum_squares<V>,
    .scale = scale<V>,
    .round = round,
    .interleave = interleave_avx512,
    .silu_mul = silu_mul<V>,
};

}  // namespace parrot::cpu
#endif
