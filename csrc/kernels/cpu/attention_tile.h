// The attention kernel over a vector type V, which the source of each instruction set defines in an anonymous
// namespace (so that everything here is instantiated per instruction set; see isa.h). V offers
//   Reg, kWidth (4, 8 or 16), kRegisters (accumulators that the product kernel may hold)
//   zero() set1(x) load(float*) store(float*, Reg) add mul max fmadd(a, b, c) = a * b + c
//   exp2(Reg): 0 for -inf      keep_first(Reg, n): lanes from n on become -inf
//   first(Reg): lane 0         hmax(Reg), hsum(Reg)
//   any_above(Reg, float): whether a lane is greater
//   load_bf16(uint16_t*), store_bf16(uint16_t*, Reg)
//   low_bf16(Reg), high_bf16(Reg): the lower or upper halves of 32-bit lanes, as bfloat16, in fp32
//   keep_lower_halves(Reg): the upper halves become zero
//   kDotsPairs: whether it has dot_pairs(a, b, c) = c + a.low * b.low + a.high * b.high by 32-bit lane, and
//   exp2_rough(Reg), good enough for bfloat16
#pragma once

#include <type_traits>

#include "kernels/cpu/attention_kernels.h"

#if defined(__clang__)
#define PARROT_UNROLL _Pragma("unroll")
#else
#define PARROT_UNROLL _Pragma("GCC unroll 16")
#endif

namespace parrot::cpu {

namespace {  // each instruction set has its own, see isa.h

// A head of a tile's blocks as they lie in the cache (kv_block.h): keys first, then values.
struct TileBlocks {
    static constexpr unsigned kBlocks = kTileTokens / kBlockTokens, kRuns = 2 * kBlocks;
    static constexpr unsigned kLineWords = 16;

    const float* runs[kRuns];

    // Into the L2, of which several tiles take a part. Lines come from all runs in turns: the hardware
    // follows each of them, and keeps more lines on the way than a core may ask for.
    void ask(unsigned line) const {
        __builtin_prefetch(runs[line % kRuns] + line / kRuns * kLineWords, 0, 2);
    }
};

// What a product asks for, a line for each 16 words that it loads of its right side.
struct TileAhead {
    const TileBlocks& tile;
    unsigned first;

    void ask(unsigned line) const { tile.ask(first + line); }
    TileAhead after(unsigned lines) const { return {tile, first + lines}; }
};

struct NothingAhead {
    void ask(unsigned) const {}
    NothingAhead after(unsigned) const { return {}; }
};

// The right sides of products. Rows that lie evenly:
struct TileRows {
    const float* first;
    int64_t stride;

    const float* at(int k, int column) const { return first + k * stride + column; }
};

// Row k: a word of each token.
struct KeyRows {
    const TileBlocks& tile;

    const float* at(int k, int column) const {
        return tile.runs[column / kBlockTokens] + k * kBlockTokens + column % kBlockTokens;
    }
};

// Row k: a word of each element, of as many tokens as a word holds.
template <class T>
struct ValueRows {
    const TileBlocks& tile;
    int64_t head_dim;

    const float* at(int k, int column) const {
        constexpr int kRows = KvBlock<T>::kValueRows;
        return tile.runs[TileBlocks::kBlocks + k / kRows] + k % kRows * head_dim + column;
    }
};

}  // namespace

// What the words of a product hold: numbers, pairs of bfloat16, or on the right only pairs, for twice as many
// numbers on the left.
enum class Words { kNumbers, kPairs, kPairsOnRight };

template <class V>
struct AttentionTile {
    using Reg = typename V::Reg;
    static constexpr int W = V::kWidth;

    static Reg load(const float* from) { return V::load(from); }
    static Reg load(const uint16_t* from) { return V::load_bf16(from); }
    static void store(float* to, Reg value) { V::store(to, value); }
    static void store(uint16_t* to, Reg value) { V::store_bf16(to, value); }

    // --- products -----------------------------------------------------------------------------------------

    // c[R, N vectors] = a[R, depth] x b[depth, .], plus c where kAdds; `depth` in words of b. The
    // accumulators stay in registers; loops over them are unrolled early, or GCC keeps a copy of the array in
    // memory.
    template <Words kWords, bool kAdds, int R, int N, class B, class Ahead>
    static void product_block(int depth, const float* a, int64_t lda, const B& b, int column, float* c,
                              int64_t ldc, const Ahead& ahead) {
        Reg acc[R][N];
        PARROT_UNROLL
        for (int r = 0; r < R; ++r) {
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) {
                acc[r][n] = kAdds ? V::load(c + r * ldc + n * W) : V::zero();
            }
        }
        for (int k = 0; k < depth; ++k) {
            Reg row[N];
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) {
                row[n] = V::load(b.at(k, column + n * W));
                if (n * W % 16 == 0) ahead.ask(unsigned(column * depth + (k * N + n) * W) / 16);
            }
            PARROT_UNROLL
            for (int r = 0; r < R; ++r) add_row<kWords>(a + r * lda, k, row, acc[r]);
        }
        PARROT_UNROLL
        for (int r = 0; r < R; ++r) {
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) V::store(c + r * ldc + n * W, acc[r][n]);
        }
    }

    template <Words kWords, int N>
    static void add_row(const float* a, int k, const Reg (&row)[N], Reg (&acc)[N]) {
        if constexpr (kWords == Words::kPairsOnRight) {
            const Reg first = V::set1(a[2 * k]), second = V::set1(a[2 * k + 1]);
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) {
                acc[n] = V::fmadd(first, V::low_bf16(row[n]), acc[n]);
                acc[n] = V::fmadd(second, V::high_bf16(row[n]), acc[n]);
            }
        } else {
            const Reg factor = V::set1(a[k]);
            PARROT_UNROLL
            for (int n = 0; n < N; ++n) {
                if constexpr (kWords == Words::kPairs) {
                    acc[n] = V::dot_pairs(factor, row[n], acc[n]);
                } else {
                    acc[n] = V::fmadd(factor, row[n], acc[n]);
                }
            }
        }
    }

    // `columns` is a multiple of 16. A block is as many times 16 columns wide as registers allow.
    template <Words kWords, bool kAdds, int R, class B, class Ahead>
    static void product_rows(int depth, const float* a, int64_t lda, const B& b, float* c, int64_t ldc,
                             int columns, const Ahead& ahead) {
        constexpr int kUnit = 16 / W, kMost = V::kRegisters / (R * kUnit);
        constexpr int kWide = kMost < 1 ? 1 : kMost > 4 ? 4 : kMost;
        for (int column = 0; column < columns;) {
            const int left = (columns - column) / 16, units = left < kWide ? left : kWide;
            const auto block = [&]<int kUnits>(std::integral_constant<int, kUnits>) {
                product_block<kWords, kAdds, R, (kUnits <= kWide ? kUnits : 1) * kUnit>(
                    depth, a, lda, b, column, c + column, ldc, ahead);
            };
            switch (units) {
                case 4:
                    block(std::integral_constant<int, 4>());
                    break;
                case 3:
                    block(std::integral_constant<int, 3>());
                    break;
                case 2:
                    block(std::integral_constant<int, 2>());
                    break;
                default:
                    block(std::integral_constant<int, 1>());
            }
            column += 16 * units;
        }
    }

    template <Words kWords, bool kAdds, class B, class Ahead>
    static void product(int rows, int depth, const float* a, int64_t lda, const B& b, float* c, int64_t ldc,
                        int columns, const Ahead& ahead) {
        static_assert(kMaxTileRows == 6);
        switch (rows) {
            case 1:
                return product_rows<kWords, kAdds, 1>(depth, a, lda, b, c, ldc, columns, ahead);
            case 2:
                return product_rows<kWords, kAdds, 2>(depth, a, lda, b, c, ldc, columns, ahead);
            case 3:
                return product_rows<kWords, kAdds, 3>(depth, a, lda, b, c, ldc, columns, ahead);
            case 4:
                return product_rows<kWords, kAdds, 4>(depth, a, lda, b, c, ldc, columns, ahead);
            case 5:
                return product_rows<kWords, kAdds, 5>(depth, a, lda, b, c, ldc, columns, ahead);
            default:
                return product_rows<kWords, kAdds, 6>(depth, a, lda, b, c, ldc, columns, ahead);
        }
    }

    // --- tiles --------------------------------------------------------------------------------------------

    // Rows of pairs of bfloat16 as twice as many rows of numbers, `to` [2 * depth, columns].
    template <class B>
    static void widen(const B& pairs, int depth, int columns, float* to) {
        for (int k = 0; k < depth; ++k, to += 2 * columns) {
            for (int column = 0; column < columns; column += W) {
                const Reg words = V::load(pairs.at(k, column));
                V::store(to + column, V::low_bf16(words));
                V::store(to + columns + column, V::high_bf16(words));
            }
        }
    }

    // A row of pairs of which only the first halves count; the second ones become zero.
    static void keep_firsts(const float* pairs, int columns, float* to) {
        for (int i = 0; i < columns; i += W) V::store(to + i, V::keep_lower_halves(V::load(pairs + i)));
    }

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
