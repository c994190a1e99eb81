// One work item of the attention: its loop over tiles of 64 tokens, and the merge of parts (see
// attention_tile.h for V).
#pragma once

#include "kernels/cpu/attention_tile.h"

namespace parrot::cpu {

template <class V, class T>
class AttentionItemKernel {
  public:
    static void attend(const AttentionTensors& tensors, const AttentionItem& item,
                       const AttentionPartials& partials, const AttentionScratch& scratch) {
        AttentionItemKernel(tensors, item, partials, scratch).run();
    }

    static void merge(const AttentionTensors& tensors, const AttentionPartials& partials, int32_t first,
                      int32_t part_stride, int32_t num_parts, int32_t row) {
        for (int32_t head = 0; head < tensors.num_heads; ++head) {
            T* output = static_cast<T*>(tensors.output) + row * tensors.output_stride +
                        int64_t(head) * tensors.head_dim;
            merge_head(tensors, partials, first, part_stride, num_parts, head, output);
        }
    }

  private:
    using Tile = AttentionTile<V>;
    using Reg = typename V::Reg;
    static constexpr int W = V::kWidth;
    static constexpr int64_t kLine = 64 / sizeof(T);

    AttentionItemKernel(const AttentionTensors& tensors, const AttentionItem& item,
                        const AttentionPartials& partials, const AttentionScratch& scratch)
        : t_(tensors),
          item_(item),
          partials_(partials),
          s_(scratch),
          group_(tensors.num_heads / tensors.num_kv_heads),
          rows_(item.num_members * group_),
          token_stride_(int64_t(tensors.num_kv_heads) * tensors.head_dim) {}

    void run() {
        load_queries();
        for (int32_t begin = item_.begin; begin < item_.end; begin += kTileTokens) {
            const int32_t left = item_.end - begin;
            const int tokens = left < kTileTokens ? left : kTileTokens;
            for (int32_t head = item_.head_begin; head < item_.head_end; ++head) {
                pack(begin, tokens, head);
                attend_tile(begin, tokens, head);
            }
        }
        for (int32_t head = item_.head_begin; head < item_.head_end; ++head) store_head(head);
    }

    void load_queries() {
        const int64_t d = t_.head_dim;
        float* to = s_.query;
        float* output = s_.output;
        for (int32_t head = item_.head_begin; head < item_.head_end; ++head) {
            for (int32_t m = 0; m < item_.num_members; ++m) {
                const T* from = static_cast<const T*>(t_.query) + item_.members[m].row * t_.query_stride +
                                int64_t(head) * group_ * d;
                for (int64_t i = 0; i < group_ * d; i += W) {
                    V::store(to + i, Tile::load(from + i));
                    V::store(output + i, V::zero());
                }
                to += group_ * d;
                output += group_ * d;
            }
        }
        const int64_t states = int64_t(item_.head_end - item_.head_begin) * rows_;
        for (int64_t i = 0; i < states; ++i) {
            s_.max[i] = -Tile::kInfinity;
            s_.sum[i] = 0;
        }
    }

    // The offset in elements of a token of the cache.
    int64_t offset(int32_t position, int32_t head) const {
        const int64_t block = item_.block_table[position / kBlockTokens];
        return (block * kBlockTokens + position % kBlockTokens) * token_stride_ + int64_t(head) * t_.head_dim;
    }

    // Fills the tile's keys and values, asking meanwhile for those that come next.
    void pack(int32_t begin, int tokens, int32_t head) {
        const T* keys = static_cast<const T*>(t_.keys);
        const T* values = static_cast<const T*>(t_.values);
        int32_t next = begin, next_head = head + 1;
        if (next_head == item_.head_end) {
            next += kTileTokens;
            next_head = item_.head_begin;
        }
        for (int i = 0; i < tokens; i += kBlockTokens) {
            if (next + i < item_.end) {
                prefetch(keys + offset(next + i, next_head));
                prefetch(values + offset(next + i, next_head));
            }
            const int64_t from = offset(begin + i, head);
            const int count = tokens - i < kBlockTokens ? tokens - i : kBlockTokens;
            Tile::pack_keys(keys + from, token_stride_, t_.head_dim, s_.keys + i);
            Tile::pack_values(values + from, token_stride_, count, t_.head_dim,
                              s_.values + int64_t(i) * t_.head_dim);
        }
    }

    void prefetch(const T* block) const {
        for (int t = 0; t < kBlockTokens; ++t) {
            for (int64_t i = 0; i < t_.head_dim; i += kLine)
                __builtin_prefetch(block + t * token_stride_ + i, 0, 2);
        }
    }

    // Scores, weights and sums of the tile for all rows, a few at a time, as even as they divide.
    void attend_tile(int32_t begin, int tokens, int32_t head) {
        const int blocks = (rows_ + kMaxTileRows - 1) / kMaxTileRows;
        for (int i = 0; i < blocks; ++i) {
            const int row = rows_ * i / blocks;
            attend_rows(begin, tokens, head - item_.head_begin, row, rows_ * (i + 1) / blocks - row);
        }
    }

    void attend_rows(int32_t begin, int tokens, int32_t head, int row, int count) {
        const int64_t d = t_.head_dim, state = int64_t(head) * rows_ + row;
        const int columns = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
        float* output = s_.output + state * d;
        Tile::template product<false>(count, t_.head_dim, s_.query + state * d, d, s_.keys, kTileTokens,
                                      s_.scores, kTileTokens, columns);
        for (int r = 0; r < count; ++r) {
            const int32_t visible = item_.members[(row + r) / group_].visible - begin;
            const float shrink =
                Tile::weigh(s_.scores + r * kTileTokens, columns, visible < tokens ? visible : tokens,
                            t_.scale, s_.max[state + r], s_.sum[state + r]);
            Tile::shrink_row(output + r * d, t_.head_dim, shrink);
        }
        Tile::template product<true>(count, tokens, s_.scores, kTileTokens, s_.values, d, output, d,
                                     t_.head_dim);
    }

    void store_head(int32_t head) {
        for (int32_t m = 0; m < item_.num_members; ++m) {
            for (int32_t g = 0; g < group_; ++g) {
                const int64_t state = int64_t(head - item_.head_begin) * rows_ + m * group_ + g;
                store_row(item_.members[m], head * group_ + g, s_.output + state * t_.head_dim, s_.max[state],
                          s_.sum[state]);
            }
        }
    }

    void store_row(const AttentionMember& member, int32_t head, const float* from, float max, float sum) {
        const int64_t d = t_.head_dim;
        if (member.partial < 0) {
            T* to = static_cast<T*>(t_.output) + member.row * t_.output_stride + head * d;
            const Reg factor = V::set1(1 / sum);
            for (int64_t i = 0; i < d; i += W) Tile::store(to + i, V::mul(V::load(from + i), factor));
            return;
        }
        const int64_t index = int64_t(member.partial) * t_.num_heads + head;
        for (int64_t i = 0; i < d; i += W) V::store(partials_.numerators + index * d + i, V::load(from + i));
        partials_.max_sums[2 * index] = max;
        partials_.max_sums[2 * index + 1] = sum;
    }

    static float power(float exponent) { return V::first(V::exp2(V::set1(exponent))); }

    static void merge_head(const AttentionTensors& tensors, const AttentionPartials& partials, int32_t first,
                           int32_t part_stride, int32_t num_parts, int32_t head, T* output) {
        const auto index = [&](int32_t part) {
            return (first + int64_t(part) * part_stride) * tensors.num_heads + head;
        };
        float max = -Tile::kInfinity, sum = 0;
        for (int32_t p = 0; p < num_parts; ++p) {
            const float part_max = partials.max_sums[2 * index(p)];
            if (part_max > max) max = part_max;
        }
        for (int32_t p = 0; p < num_parts; ++p) {
            sum += power(partials.max_sums[2 * index(p)] - max) * partials.max_sums[2 * index(p) + 1];
        }
        for (int32_t d = 0; d < tensors.head_dim; d += 16) {
            Reg total[16 / W];
            for (Reg& reg : total) reg = V::zero();
            for (int32_t p = 0; p < num_parts; ++p) {
                const Reg weight = V::set1(power(partials.max_sums[2 * index(p)] - max) / sum);
                const float* from = partials.numerators + index(p) * tensors.head_dim + d;
                for (int i = 0; i < 16 / W; ++i) total[i] = V::fmadd(weight, V::load(from + i * W), total[i]);
            }
            for (int i = 0; i < 16 / W; ++i) Tile::store(output + d + i * W, total[i]);
        }
    }

    const AttentionTensors& t_;
    const AttentionItem& item_;
    const AttentionPartials& partials_;
    const AttentionScratch& s_;
    const int32_t group_;
    const int32_t rows_;
    const int64_t token_stride_;
};

}  // namespace parrot::cpu
