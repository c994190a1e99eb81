// The attention kernel over a vector type V, which the source of each instruction set defines in an anonymous
// namespace (so that everything here is instantiated per instruction set; see isa.h). V offers
//   Reg, kWidth (4, 8 or 16), kRegisters (accumulators that the product kernel may hold)
//   zero() set1(x) load(float*) store(float*, Reg) add mul max fmadd(a, b, c) = a * b + c
//   exp2(Reg): 0 for -inf      keep_first(Reg, n): lanes from n on become -inf
//   first(Reg): lane 0         hmax(Reg), hsum(Reg)      transpose(Reg (&)[kWidth])
//   any_above(Reg, float): whether a lane is greater
//   load_bf16(uint16_t*), store_bf16(uint16_t*, Reg), load_pairs(uint16_t*): two elements in each lane
//   kDotsPairs: whether it has dot_pairs(a, b, c) = c + a.low * b.low + a.high * b.high by 32-bit lane,
//   load_half_pairs(uint16_t*), zero in the upper lanes, join_bf16(low, high) of what load_bf16 gave, and
//   exp2_rough(Reg), good enough for bfloat16
//   low_bf16(Reg), high_bf16(Reg): the lower or upper halves of 32-bit lanes, as bfloat16, in fp32
#pragma once

#include "kernels/cpu/attention_kernels.h"

#if defined(__clang__)
#define PARROT_UNROLL _Pragma("unroll")
#else
#define PARROT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace parrot::cpu {

// Rows of a product's right side that lie evenly.
struct TileRows {
    const float* first;
    int64_t stride;

    const float* row(int k, int column) const { return first + k * stride + column; }
};

// A tile as it lies in the cache: its blocks, and those that come next, which are asked for along the way.
template <class T>
struct TileBlocks {
    const T* now[kTileTokens / kBlockTokens];
    const T* next[kTileTokens / kBlockTokens];
    int64_t stride;  // between tokens

    const T* at(int token, int column) const {
        return now[token / kBlockTokens] + token % kBlockTokens * stride + column;
    }

    const T* row(int token, int column) const {
        if (column % 64 == 0) {
            const T* ahead = next[token / kBlockTokens] + token % kBlockTokens * stride + column;
            for (int i = 0; i < 64; i += 64 / int(sizeof(T))) __builtin_prefetch(ahead + i, 0, 2);
        }
        return at(token, column);
    }

    // Asks for tokens [first, last) of the next tile.
    void ask(int first, int last, int head_dim) const {
        for (int token = first; token < last; ++token) {
            const T* ahead = next[token / kBlockTokens] + token % kBlockTokens * stride;
            for (int d = 0; d < head_dim; d += 64 / int(sizeof(T))) __builtin_prefetch(ahead + d, 0, 2);
        }
    }
};

template <class V>
struct AttentionTile {
    using Reg = typename V::Reg;
    static constexpr int W = V::kWidth;

    static Reg load(const float* from) { return V::load(from); }
    static Reg load(const uint16_t* from) { return V::load_bf16(from); }
    static void store(float* to, Reg value) { V::store(to, value); }
    static void store(uint16_t* to, Reg value) { V::store_bf16(to, value); }

    // --- products -----------------------------------------------------------------------------------------

    // c[R, N vectors] = a[R, depth] x b[depth, .], plus c where kAdds. The accumulators stay in registers;
    // loops over them are unrolled early, or GCC keeps a copy of the array in memory. kPairs: the elements of
    // a and b are pairs of bfloat16.
    template <bool kPairs, bool kAdds, int R, int N, class B>
    static void product_block(int depth, const float* a, int64_t lda, const B& b, int column, float* c,
                              int64_t ldc) {
        Reg acc[R][N];
        PARROT_UNROLL
        for (int r = 0; r < R; ++r) {
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) {
                acc[r][n] = kAdds ? V::load(c + r * ldc + n * W) : V::zero();
            }
        }
        for (int k = 0; k < depth; ++k) {
            const auto* from = b.row(k, column);
            Reg row[N];
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) row[n] = load(from + n * W);
            PARROT_UNROLL
            for (int r = 0; r < R; ++r) {
                const Reg factor = V::set1(a[r * lda + k]);
                PARROT_UNROLL
                for (int n = 0; n < N; ++n) acc[r][n] = accumulate<kPairs>(factor, row[n], acc[r][n]);
            }
        }
        PARROT_UNROLL
        for (int r = 0; r < R; ++r) {
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) V::store(c + r * ldc + n * W, acc[r][n]);
        }
    }

    template <bool kPairs>
    static Reg accumulate(Reg a, Reg b, Reg c) {
        if constexpr (kPairs) {
            return V::dot_pairs(a, b, c);
        } else {
            return V::fmadd(a, b, c);
        }
    }

    // `columns` is a multiple of 16. A block is as many times 16 columns wide as registers allow.
    template <bool kPairs, bool kAdds, int R, class B>
    static void product_rows(int depth, const float* a, int64_t lda, const B& b, float* c, int64_t ldc,
                             int columns) {
        constexpr int kUnit = 16 / W, kMost = V::kRegisters / (R * kUnit);
        constexpr int kWide = kMost < 1 ? 1 : kMost > 4 ? 4 : kMost;
        for (int column = 0; column < columns;) {
            const int left = (columns - column) / 16, units = left < kWide ? left : kWide;
            float* to = c + column;
            if (kWide >= 4 && units == 4) {
                product_block<kPairs, kAdds, R, (kWide >= 4 ? 4 : 1) * kUnit>(depth, a, lda, b, column, to,
                                                                              ldc);
            } else if (kWide >= 3 && units == 3) {
                product_block<kPairs, kAdds, R, (kWide >= 3 ? 3 : 1) * kUnit>(depth, a, lda, b, column, to,
                                                                              ldc);
            } else if (kWide >= 2 && units == 2) {
                product_block<kPairs, kAdds, R, (kWide >= 2 ? 2 : 1) * kUnit>(depth, a, lda, b, column, to,
                                                                              ldc);
            } else {
                product_block<kPairs, kAdds, R, kUnit>(depth, a, lda, b, column, to, ldc);
            }
            column += 16 * units;
        }
    }

    template <bool kPairs, bool kAdds, class B>
    static void product(int rows, int depth, const float* a, int64_t lda, const B& b, float* c, int64_t ldc,
                        int columns) {
        static_assert(kMaxTileRows == 6);
        switch (rows) {
            case 1:
                return product_rows<kPairs, kAdds, 1>(depth, a, lda, b, c, ldc, columns);
            case 2:
                return product_rows<kPairs, kAdds, 2>(depth, a, lda, b, c, ldc, columns);
            case 3:
                return product_rows<kPairs, kAdds, 3>(depth, a, lda, b, c, ldc, columns);
            case 4:
                return product_rows<kPairs, kAdds, 4>(depth, a, lda, b, c, ldc, columns);
            case 5:
                return product_rows<kPairs, kAdds, 5>(depth, a, lda, b, c, ldc, columns);
            default:
                return product_rows<kPairs, kAdds, 6>(depth, a, lda, b, c, ldc, columns);
        }
    }

    // --- tiles --------------------------------------------------------------------------------------------

    // Writes the 16 rows of a block's keys as columns of `to` [head_dim, 64], and asks for the same of
    // `next`.
    static void pack_keys(const float* from, const float* next, int64_t stride, int head_dim, float* to) {
        for (int t = 0; t < kBlockTokens; t += W) {
            for (int d = 0; d < head_dim; d += W) {
                const int64_t at = t * stride + d;
                pack_square(from + at, next + at, stride, to + d * kTileTokens + t);
            }
        }
    }

    // Pairs of bfloat16 move as one 32-bit lane, which halves the shuffles.
    static void pack_keys(const uint16_t* from, const uint16_t* next, int64_t stride, int head_dim,
                          float* to) {
        for (int t = 0; t < kBlockTokens; t += W) {
            int d = 0;
            for (; d + 2 * W <= head_dim; d += 2 * W) {
                const int64_t at = t * stride + d;
                Reg square[W];
                PARROT_UNROLL
                for (int i = 0; i < W; ++i) {
                    square[i] = V::load_pairs(from + at + i * stride);
                    prefetch(next + at + i * stride);
                }
                V::transpose(square);
                PARROT_UNROLL
                for (int i = 0; i < W; ++i) {
                    V::store(to + (d + 2 * i) * kTileTokens + t, V::low_bf16(square[i]));
                    V::store(to + (d + 2 * i + 1) * kTileTokens + t, V::high_bf16(square[i]));
                }
            }
            for (; d < head_dim; d += W) {
                const int64_t at = t * stride + d;
                pack_square(from + at, next + at, stride, to + d * kTileTokens + t);
            }
        }
    }

    template <class T>
    static void pack_square(const T* from, const T* next, int64_t stride, float* to) {
        Reg square[W];
        PARROT_UNROLL
        for (int i = 0; i < W; ++i) {
            square[i] = load(from + i * stride);
            prefetch(next + i * stride);
        }
        V::transpose(square);
        PARROT_UNROLL
        for (int i = 0; i < W; ++i) V::store(to + i * kTileTokens, square[i]);
    }

    // The same with bfloat16 kept in pairs: columns of `to` [head_dim / 2, 64].
    static void pack_key_pairs(const uint16_t* from, const uint16_t* next, int64_t stride, int head_dim,
                               float* to) {
        for (int d = 0; d < head_dim; d += 2 * W) {
            const bool whole = d + 2 * W <= head_dim;
            Reg square[W];
            PARROT_UNROLL
            for (int i = 0; i < W; ++i) {
                const uint16_t* row = from + d + i * stride;
                square[i] = whole ? V::load_pairs(row) : V::load_half_pairs(row);
                prefetch(next + d + i * stride);
            }
            V::transpose(square);
            PARROT_UNROLL
            for (int i = 0; i < W; ++i) {
                if (whole || 2 * i < W) V::store(to + (d / 2 + i) * kTileTokens, square[i]);
            }
        }
    }

    template <class T>
    static void pack_values(const TileBlocks<T>& blocks, int tokens, int head_dim, float* to) {
        for (int t = 0; t < tokens; ++t) {
            for (int d = 0; d < head_dim; d += 16) {
                const T* from = blocks.at(t, d);
                PARROT_UNROLL
                for (int i = 0; i < 16; i += W) V::store(to + t * head_dim + d + i, load(from + i));
            }
        }
    }

    // Tokens in pairs: [tokens / 2, head_dim]. The partner of an odd last one is zero.
    static void pack_value_pairs(const TileBlocks<uint16_t>& blocks, int tokens, int head_dim, float* to) {
        for (int t = 0; t < tokens; t += 2, to += head_dim) {
            for (int d = 0; d < head_dim; d += W) {
                const Reg first = V::load_bf16(blocks.at(t, d));
                const Reg second = t + 1 < tokens ? V::load_bf16(blocks.at(t + 1, d)) : V::zero();
                V::store(to + d, V::join_bf16(first, second));
            }
        }
    }

    // Into the L2: the L1 has a tile in it.
    static void prefetch(const void* address) { __builtin_prefetch(address, 0, 2); }

    // --- softmax ------------------------------------------------------------------------------------------

    // The softmax of a few rows over a tile. Weights are 2^(score - reference), where a row's reference is
    // the highest score of some tile: it follows the highest only when that is kHeadroom above it, which is
    // rare after the first tile. Until then weights are at most 2^kHeadroom, and nothing has to be scaled.
    struct Softmax {
        float* reference;  // [rows]
        float* sum;        // [rows, kSumLanes] of weights, by lane
        float* output;     // [rows, head_dim]
        float scale;       // of the scores
        int head_dim;

        // Turns scores [rows, 64], of which the first `limits` count, into weights, and adds them to the
        // sums. kPairs: the weights are stored as bfloat16, in the first half of each row.
        template <bool kPairs>
        void weigh(int rows, float* scores, int columns, const int* limits) const {
            for (int r = 0; r < rows; ++r) {
                Reg highest = V::set1(-kInfinity);
                for (int c = 0; c < columns; c += W) {
                    highest = V::max(keep(V::load(scores + r * kTileTokens + c), limits[r] - c), highest);
                }
                highest = V::mul(highest, V::set1(scale));
                if (V::any_above(highest, reference[r] + kHeadroom)) raise(r, V::hmax(highest));
            }
            for (int r = 0; r < rows; ++r) {
                float* row = scores + r * kTileTokens;
                const bool sees_nothing = reference[r] == -kInfinity;
                const Reg negative = V::set1(sees_nothing ? 0 : -reference[r]);
                Reg total = V::load(sum + r * kSumLanes);
                for (int c = 0; c < columns; c += W) {
                    const Reg exponent =
                        keep(V::fmadd(V::load(row + c), V::set1(scale), negative), limits[r] - c);
                    Reg weight;
                    if constexpr (kPairs) {
                        weight = V::exp2_rough(exponent);
                        V::store_bf16(reinterpret_cast<uint16_t*>(row) + c, weight);
                    } else {
                        weight = V::exp2(exponent);
                        V::store(row + c, weight);
                    }
                    total = V::add(total, weight);
                }
                V::store(sum + r * kSumLanes, total);
            }
        }

        static Reg keep(Reg scores, int count) { return count < W ? V::keep_first(scores, count) : scores; }

        void raise(int r, float highest) const {
            const Reg shrink = V::exp2(V::set1(reference[r] - highest));
            reference[r] = highest;
            V::store(sum + r * kSumLanes, V::mul(shrink, V::load(sum + r * kSumLanes)));
            float* row = output + r * head_dim;
            for (int d = 0; d < head_dim; d += W) V::store(row + d, V::mul(shrink, V::load(row + d)));
        }
    };

    static constexpr float kHeadroom = 8;
    static constexpr float kInfinity = __builtin_huge_valf();
};

}  // namespace parrot::cpu
