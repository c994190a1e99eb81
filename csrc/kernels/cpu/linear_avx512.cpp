#if defined(__AVX512F__)
#include "kernels/cpu/interleave_avx512.h"
#include "kernels/cpu/linear_tile.h"
#include "kernels/cpu/linear_vector_avx512.h"

namespace parrot::cpu {
namespace {

constexpr TileKernel kFp32[] = {tile_fp32<V, 1>, tile_fp32<V, 2>,  tile_fp32<V, 3>,  tile_fp32<V, 4>,
                                tile_fp32<V, 5>, tile_fp32<V, 6>,  tile_fp32<V, 7>,  tile_fp32<V, 8>,
                                tile_fp32<V, 9>, tile_fp32<V, 10>, tile_fp32<V, 11>, tile_fp32<V, 12>};
constexpr TileKernel kBf16[] = {tile_bf16<V, 1>, tile_bf16<V, 2>,  tile_bf16<V, 3>,  tile_bf16<V, 4>,
                                tile_bf16<V, 5>, tile_bf16<V, 6>,  tile_bf16<V, 7>,  tile_bf16<V, 8>,
                                tile_bf16<V, 9>, tile_bf16<V, 10>, tile_bf16<V, 11>, tile_bf16<V, 12>};

}  // namespace

const LinearKernels kLinearAvx512{
    .max_rows = 12,
    .bf16_pairs = false,
    .fp32 = kFp32,
    .bf16 = kBf16,
    .sum_squares = sum_squares<V>,
    .scale = scale<V>,
    .round = nullptr,  // no pairs
    .interleave = interleave_avx512,
    .silu_mul = silu_mul<V>,
};

}  // namespace parrot::cpu
#endif
