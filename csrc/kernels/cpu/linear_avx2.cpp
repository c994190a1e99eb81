#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "kernels/cpu/linear_tile.h"

namespace parrot::cpu {
namespace {

struct V {
    using Reg = __m256;
    static constexpr int kWidth = 8, kVectors = 2;  // 6 rows: 12 sums, 2 weights and an input in 16 registers

    static Reg zero() { return _mm256_setzero_ps(); }
    static Reg broadcast(float x) { return _mm256_set1_ps(x); }
    static Reg load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, Reg x) { _mm256_storeu_ps(p, x); }
    static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
    static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
    static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
    static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
    static Reg max(Reg a, Reg b) { return _mm256_max_ps(a, b); }
    static Reg round(Reg x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static Reg exp2_int(Reg x) {
        const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
        return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    }
    static void load_pairs(const uint16_t* p, Reg& even, Reg& odd) {
        const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
        odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
    }
};

constexpr TileKernel kFp32[] = {tile_fp32<V, 1>, tile_fp32<V, 2>, tile_fp32<V, 3>,
                                tile_fp32<V, 4>, tile_fp32<V, 5>, tile_fp32<V, 6>};
constexpr TileKernel kBf16[] = {tile_bf16<V, 1>, tile_bf16<V, 2>, tile_bf16<V, 3>,
                                tile_bf16<V, 4>, tile_bf16<V, 5>, tile_bf16<V, 6>};

}  // namespace

const LinearKernels kLinearAvx2{
    .max_rows = 6,
    .bf16_pairs = false,
    .fp32 = kFp32,
    .bf16 = kBf16,
    .sum_squares = sum_squares<V>,
    .scale = scale<V>,
    .round = nullptr,  // no pairs
    .interleave = interleave<V>,
    .silu_mul = silu_mul<V>,
};

}  // namespace parrot::cpu
#endif
