// The attention kernel over a vector type V, which the source of each instruction set defines in an anonymous
// namespace (so that everything here is instantiated per instruction set; see isa.h). V offers
//   Reg, kWidth (4, 8 or 16), kRegisters (accumulators that the product kernel may hold)
//   zero() set1(x) load(float*) store(float*, Reg) add mul max fmadd(a, b, c) = a * b + c
//   exp2(Reg): 0 for -inf      keep_first(Reg, n): lanes from n on become -inf
//   first(Reg): lane 0         hmax(Reg), hsum(Reg)      transpose(Reg (&)[kWidth])
//   load_bf16(uint16_t*), store_bf16(uint16_t*, Reg), load_pairs(uint16_t*): two elements in each lane
//   low_bf16(Reg), high_bf16(Reg): the lower or upper halves of 32-bit lanes, as bfloat16, in fp32
#pragma once

#include "kernels/cpu/attention_kernels.h"

namespace parrot::cpu {

template <class V>
struct AttentionTile {
    using Reg = typename V::Reg;
    static constexpr int W = V::kWidth;

    static Reg load(const float* from) { return V::load(from); }
    static Reg load(const uint16_t* from) { return V::load_bf16(from); }
    static void store(float* to, Reg value) { V::store(to, value); }
    static void store(uint16_t* to, Reg value) { V::store_bf16(to, value); }

    // --- products -----------------------------------------------------------------------------------------

    // c[R, N vectors] = a[R, depth] x b[depth, .] (+ c). The accumulators stay in registers.
    template <int R, int N, bool kAccumulate>
    static void product_block(int depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                              int64_t ldc) {
        Reg acc[R][N];
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < N; ++n) acc[r][n] = kAccumulate ? V::load(c + r * ldc + n * W) : V::zero();
        }
        for (int k = 0; k < depth; ++k) {
            Reg row[N];
            for (int n = 0; n < N; ++n) row[n] = V::load(b + k * ldb + n * W);
            for (int r = 0; r < R; ++r) {
                const Reg factor = V::set1(a[r * lda + k]);
                for (int n = 0; n < N; ++n) acc[r][n] = V::fmadd(factor, row[n], acc[r][n]);
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int n = 0; n < N; ++n) V::store(c + r * ldc + n * W, acc[r][n]);
        }
    }

    // Vectors of a block: what registers allow, of the 16 columns that are always there or a multiple.
    template <int R>
    static constexpr int vectors() {
        int n = 16 / W;
        while (n * 2 * W <= kTileTokens && n * 2 * R <= V::kRegisters) n *= 2;
        return n;
    }

    // `columns` is a multiple of 16.
    template <int R, bool kAccumulate>
    static void product_rows(int depth, const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                             int64_t ldc, int columns) {
        constexpr int kWide = vectors<R>(), kNarrow = 16 / W;
        int column = 0;
        for (; column + kWide * W <= columns; column += kWide * W) {
            product_block<R, kWide, kAccumulate>(depth, a, lda, b + column, ldb, c + column, ldc);
        }
        for (; column < columns; column += 16) {
            product_block<R, kNarrow, kAccumulate>(depth, a, lda, b + column, ldb, c + column, ldc);
        }
    }

    template <bool kAccumulate>
    static void product(int rows, int depth, const float* a, int64_t lda, const float* b, int64_t ldb,
                        float* c, int64_t ldc, int columns) {
        static_assert(kMaxTileRows == 6);
        switch (rows) {
            case 1:
                return product_rows<1, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
            case 2:
                return product_rows<2, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
            case 3:
                return product_rows<3, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
            case 4:
                return product_rows<4, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
            case 5:
                return product_rows<5, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
            default:
                return product_rows<6, kAccumulate>(depth, a, lda, b, ldb, c, ldc, columns);
        }
    }

    // --- tiles --------------------------------------------------------------------------------------------

    // Writes the 16 rows of a block's keys as columns of `to` [head_dim, 64].
    static void pack_keys(const float* from, int64_t stride, int head_dim, float* to) {
        for (int t = 0; t < kBlockTokens; t += W) {
            for (int d = 0; d < head_dim; d += W)
                pack_square(from + t * stride + d, stride, to + d * kTileTokens + t);
        }
    }

    // Pairs of bfloat16 move as one 32-bit lane, which halves the shuffles.
    static void pack_keys(const uint16_t* from, int64_t stride, int head_dim, float* to) {
        for (int t = 0; t < kBlockTokens; t += W) {
            int d = 0;
            for (; d + 2 * W <= head_dim; d += 2 * W) {
                Reg square[W];
                for (int i = 0; i < W; ++i) square[i] = V::load_pairs(from + (t + i) * stride + d);
                V::transpose(square);
                for (int i = 0; i < W; ++i) {
                    V::store(to + (d + 2 * i) * kTileTokens + t, V::low_bf16(square[i]));
                    V::store(to + (d + 2 * i + 1) * kTileTokens + t, V::high_bf16(square[i]));
                }
            }
            for (; d < head_dim; d += W) pack_square(from + t * stride + d, stride, to + d * kTileTokens + t);
        }
    }

    template <class T>
    static void pack_square(const T* from, int64_t stride, float* to) {
        Reg square[W];
        for (int i = 0; i < W; ++i) square[i] = load(from + i * stride);
        V::transpose(square);
        for (int i = 0; i < W; ++i) V::store(to + i * kTileTokens, square[i]);
    }

    template <class T>
    static void pack_values(const T* from, int64_t stride, int tokens, int head_dim, float* to) {
        for (int t = 0; t < tokens; ++t) {
            for (int d = 0; d < head_dim; d += W)
                V::store(to + t * head_dim + d, load(from + t * stride + d));
        }
    }

    // --- softmax ------------------------------------------------------------------------------------------

    // Turns `columns` scores, of which the first `limit` count, into weights; returns what the row's earlier
    // results shrink by. `max` and `sum` are the row's so far.
    static float weigh(float* scores, int columns, int limit, float scale, float& max, float& sum) {
        const Reg factor = V::set1(scale);
        Reg highest = V::set1(-kInfinity);
        for (int c = 0; c < columns; c += W) {
            const Reg scaled = V::keep_first(V::mul(V::load(scores + c), factor), limit - c);
            V::store(scores + c, scaled);
            highest = V::max(scaled, highest);
        }
        const float before = max, tile_max = V::hmax(highest);
        max = tile_max > before ? tile_max : before;
        const float base = max == -kInfinity ? 0 : max;  // a row that sees nothing yet
        const Reg negative = V::set1(-base);
        Reg total = V::zero();
        for (int c = 0; c < columns; c += W) {
            const Reg weight = V::exp2(V::add(V::load(scores + c), negative));
            V::store(scores + c, weight);
            total = V::add(total, weight);
        }
        const float shrink = max == before ? 1 : V::first(V::exp2(V::set1(before - base)));
        sum = sum * shrink + V::hsum(total);
        return shrink;
    }

    static void shrink_row(float* row, int head_dim, float factor) {
        if (factor == 1) return;
        const Reg by = V::set1(factor);
        for (int d = 0; d < head_dim; d += W) V::store(row + d, V::mul(V::load(row + d), by));
    }

    static constexpr float kInfinity = __builtin_huge_valf();
};

}  // namespace parrot::cpu
