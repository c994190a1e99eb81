// Plain C++; the compiler may still vectorise it for the least that the target has.
#include <bit>
#include <cmath>

#include "kernels/cpu/linear_tile.h"

namespace parrot::cpu {
namespace {

struct V {
    using Reg = float;
    static constexpr int kWidth = 1, kVectors = 8;

    static Reg zero() { return 0; }
    static Reg broadcast(float x) { return x; }
    static Reg load(const float* p) { return *p; }
    static void store(float* p, Reg x) { *p = x; }
    static Reg fma(Reg a, Reg b, Reg c) { return a * b + c; }
    static Reg mul(Reg a, Reg b) { return a * b; }
    static Reg add(Reg a, Reg b) { return a + b; }
    static Reg div(Reg a, Reg b) { return a / b; }
    static Reg min(Reg a, Reg b) { return a < b ? a : b; }
    static Reg max(Reg a, Reg b) { return a > b ? a : b; }
    static Reg round(Reg x) { return std::nearbyint(x); }
    static Reg exp2_int(Reg x) {
        return std::bit_cast<float>(static_cast<uint32_t>(static_cast<int32_t>(x) + 127) << 23);
    }
    static void load_pairs(const uint16_t* p, Reg& even, Reg& odd) {
        even = std::bit_cast<float>(static_cast<uint32_t>(p[0]) << 16);
        odd = std::bit_cast<float>(static_cast<uint32_t>(p[1]) << 16);
    }
};

constexpr TileKernel kFp32[] = {tile_fp32<V, 1>, tile_fp32<V, 2>, tile_fp32<V, 3>, tile_fp32<V, 4>};
constexpr TileKernel kBf16[] = {tile_bf16<V, 1>, tile_bf16<V, 2>, tile_bf16<V, 3>, tile_bf16<V, 4>};

}  // namespace

const LinearKernels kLinearScalar{
    .max_rows = 4,
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
