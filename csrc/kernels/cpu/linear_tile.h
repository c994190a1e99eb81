// What the kernels of packed linear layers are in every instruction set, over a vector type V:
//   V::kWidth lanes in V::Reg; V::kVectors vectors of outputs are computed at a time (registers bound it)
//   zero, broadcast, load, store, fma(a, b, c) = a * b + c, mul, add, div
//   load_pairs(p, even, odd): 2 * kWidth bf16 as fp32, those of even and of odd index
//   exp2_int(x): 2^x of integers as floats in [-126, 127]; round, min, max
// Only files compiled for one set include this, with a V in an anonymous namespace (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/linear_kernels.h"

namespace parrot::cpu {

// As many lines from `ahead` on as one step of a kernel loads of a tile. Past the end it does nothing.
template <class V>
inline void prefetch(const char* ahead) {
    constexpr int kBytes = V::kWidth * V::kVectors * 4;
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(ahead + i, 0, 2);
}

template <class V, int kRows>
void tile_fp32(const void* panel, const void* tile, int64_t depth, const Ahead& next, float* sums) {
    constexpr int kColumns = V::kWidth * V::kVectors;
    for (int first = 0; first < kTileColumns; first += kColumns) {
        const float* x = static_cast<const float*>(panel);
        const float* w = static_cast<const float*>(tile) + first;
        const char* ahead = static_cast<const char*>(next.address) + 4 * first;
        typename V::Reg sum[kRows][V::kVectors];
        for (auto& row : sum) {
            for (auto& s : row) s = V::zero();
        }
        for (int64_t k = 0; k < depth; ++k, x += kRows, w += kTileColumns, ahead += next.step) {
            typename V::Reg weight[V::kVectors];
            prefetch<V>(ahead);
#pragma GCC unroll 8
            for (int v = 0; v < V::kVectors; ++v) weight[v] = V::load(w + v * V::kWidth);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const typename V::Reg input = V::broadcast(x[r]);
#pragma GCC unroll 8
                for (int v = 0; v < V::kVectors; ++v) sum[r][v] = V::fma(input, weight[v], sum[r][v]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < V::kVectors; ++v) {
                V::store(sums + r * kTileColumns + first + v * V::kWidth, sum[r][v]);
            }
        }
    }
}

template <class V, int kRows>
void tile_bf16(const void* panel, const void* tile, int64_t depth, const Ahead& next, float* sums) {
    constexpr int kColumns = V::kWidth * V::kVectors;
    for (int first = 0; first < kTileColumns; first += kColumns) {
        const float* x = static_cast<const float*>(panel);
        const uint16_t* w = static_cast<const uint16_t*>(tile) + 2 * first;
        const char* ahead = static_cast<const char*>(next.address) + 4 * first;
        typename V::Reg sum[kRows][V::kVectors];
        for (auto& row : sum) {
            for (auto& s : row) s = V::zero();
        }
        for (int64_t k = 0; k < depth; k += 2, x += 2 * kRows, w += 2 * kTileColumns, ahead += next.step) {
            typename V::Reg even[V::kVectors], odd[V::kVectors];
            prefetch<V>(ahead);
#pragma GCC unroll 8
            for (int v = 0; v < V::kVectors; ++v) V::load_pairs(w + 2 * v * V::kWidth, even[v], odd[v]);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const typename V::Reg input = V::broadcast(x[r]);
#pragma GCC unroll 8
                for (int v = 0; v < V::kVectors; ++v) sum[r][v] = V::fma(input, even[v], sum[r][v]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                const typename V::Reg input = V::broadcast(x[kRows + r]);
#pragma GCC unroll 8
                for (int v = 0; v < V::kVectors; ++v) sum[r][v] = V::fma(input, odd[v], sum[r][v]);
            }
        }
        for (int r = 0; r < kRows; ++r) {
            for (int v = 0; v < V::kVectors; ++v) {
                V::store(sums + r * kTileColumns + first + v * V::kWidth, sum[r][v]);
            }
        }
    }
}

template <class V>
float sum_squares(const float* x, int64_t n) {
    typename V::Reg sum = V::zero();
    int64_t i = 0;
    for (; i + V::kWidth <= n; i += V::kWidth) {
        const typename V::Reg value = V::load(x + i);
        sum = V::fma(value, value, sum);
    }
    float lanes[V::kWidth];
    V::store(lanes, sum);
    float total = 0;
    for (const float lane : lanes) total += lane;
    for (; i < n; ++i) total += x[i] * x[i];
    return total;
}

template <class V>
void scale(const float* x, float scale, const float* weight, float* y, int64_t n) {
    const typename V::Reg factor = V::broadcast(scale);
    int64_t i = 0;
    for (; i + V::kWidth <= n; i += V::kWidth) {
        V::store(y + i, V::mul(V::mul(V::load(x + i), factor), V::load(weight + i)));
    }
    for (; i < n; ++i) y[i] = x[i] * scale * weight[i];
}

template <class V>
void interleave(const float* const* x, int64_t rows, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t r = 0; r < rows; ++r) *to++ = x[r][i];
    }
}

// exp within 2 ulp for |x| <= 87; below it is 2^-126, above 2^127, near enough for a sigmoid.
template <class V>
typename V::Reg exp(typename V::Reg x) {
    const typename V::Reg limit = V::broadcast(87.0F);
    x = V::max(V::min(x, limit), V::broadcast(-87.0F));
    const typename V::Reg n = V::round(V::mul(x, V::broadcast(1.44269504F)));
    // x - n ln 2, with ln 2 in two parts so that the difference is exact.
    typename V::Reg r = V::fma(n, V::broadcast(-0.693359375F), x);
    r = V::fma(n, V::broadcast(2.12194440e-4F), r);
    typename V::Reg p = V::broadcast(1.0F / 720);
    for (const float c : {1.0F / 120, 1.0F / 24, 1.0F / 6, 0.5F, 1.0F, 1.0F})
        p = V::fma(p, r, V::broadcast(c));
    return V::mul(p, V::exp2_int(n));
}

template <class V>
void silu_mul(const float* sums, int64_t rows, float* out) {
    constexpr int kHalf = kTileColumns / 2;
    const typename V::Reg one = V::broadcast(1.0F);
    for (int64_t row = 0; row < rows; ++row, sums += kTileColumns, out += kHalf) {
        for (int i = 0; i < kHalf; i += V::kWidth) {
            const typename V::Reg gate = V::load(sums + i), up = V::load(sums + kHalf + i);
            const typename V::Reg denominator = V::add(one, exp<V>(V::mul(gate, V::broadcast(-1.0F))));
            V::store(out + i, V::mul(V::div(gate, denominator), up));
        }
    }
}

}  // namespace parrot::cpu
