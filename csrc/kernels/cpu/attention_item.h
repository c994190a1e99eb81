// One work item of the attention: its loop over tiles of 64 tokens, and the merge of parts (see
// attention_tile.h for V).
#pragma once

#include <cstddef>
#include <type_traits>

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
    static constexpr int32_t kMostLater = 4;  // tokens of later items to ask for at a time
    // Scores are products of bfloat16 pairs: queries are kept as they are, and scores scaled instead of them.
    static constexpr bool kPairs = V::kDotsPairs && sizeof(T) == sizeof(uint16_t);

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
        plan_later();
        for (int32_t begin = item_.begin; begin < item_.end; begin += kTileTokens) {
            const int32_t left = item_.end - begin;
            const int tokens = left < kTileTokens ? left : kTileTokens;
            for (int32_t head = item_.head_begin; head < item_.head_end; ++head) {
                run_tile(begin, tokens, head);
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
                for (int32_t g = 0; g < group_; ++g) load_query(from + g * d, to + g * d);
                for (int64_t i = 0; i < group_ * d; i += W) V::store(output + i, V::zero());
                to += group_ * d;
                output += group_ * d;
            }
        }
        const int64_t states = int64_t(item_.head_end - item_.head_begin) * rows_;
        for (int64_t i = 0; i < states; ++i) {
            s_.reference[i] = -Tile::kInfinity;
            for (int lane = 0; lane < kSumLanes; lane += W)
                V::store(s_.sum + i * kSumLanes + lane, V::zero());
        }
    }

    void load_query(const T* from, float* to) const {
        if constexpr (kPairs) {
            __builtin_memcpy(to, from, static_cast<size_t>(t_.head_dim) * sizeof(T));
        } else {
            const Reg scale = V::set1(t_.scale);
            for (int32_t i = 0; i < t_.head_dim; i += W)
                V::store(to + i, V::mul(scale, Tile::load(from + i)));
        }
    }

    // The offset in elements of a token of the cache.
    int64_t offset(const AttentionItem& item, int32_t position, int32_t head) const {
        const int64_t block = item.block_table[position / kBlockTokens];
        return (block * kBlockTokens + position % kBlockTokens) * token_stride_ + int64_t(head) * t_.head_dim;
    }

    // Where the tile's keys or values lie, and those of the tile after it: the next head's, the next tokens',
    // or the next item's. A block that does not exist is replaced by one that does.
    TileBlocks<T> blocks(const void* cache, int32_t begin, int32_t head) const {
        const bool last_head = head + 1 == item_.head_end;
        int32_t next_begin = last_head ? begin + kTileTokens : begin;
        int32_t next_head = last_head ? item_.head_begin : head + 1;
        const AttentionItem* next_item = &item_;
        if (next_begin >= item_.end && item_.next != nullptr) {
            next_item = item_.next;
            next_begin = next_item->begin;
            next_head = next_item->head_begin;
        }
        TileBlocks<T> result;
        result.stride = token_stride_;
        for (int i = 0; i < kTileTokens / kBlockTokens; ++i) {
            const int32_t now = begin + i * kBlockTokens, next = next_begin + i * kBlockTokens;
            const T* from = static_cast<const T*>(cache);
            result.now[i] = from + offset(item_, now < item_.end ? now : begin, head);
            result.next[i] =
                next < next_item->end ? from + offset(*next_item, next, next_head) : result.now[i];
        }
        return result;
    }

    void run_tile(int32_t begin, int tokens, int32_t head) {
        const TileBlocks<T> keys = blocks(t_.keys, begin, head), values = blocks(t_.values, begin, head);
        const bool few_rows = rows_ <= kMaxTileRows;
        for (int i = 0; i < tokens; i += kBlockTokens) {
            const T* from = keys.now[i / kBlockTokens];
            const T* next = few_rows ? keys.next[i / kBlockTokens] : from;
            if constexpr (kPairs) {
                Tile::pack_key_pairs(from, next, token_stride_, t_.head_dim, s_.keys + i);
            } else {
                Tile::pack_keys(from, next, token_stride_, t_.head_dim, s_.keys + i);
            }
        }
        if (few_rows) {
            attend_rows(begin, tokens, head, 0, rows_, values);
            return;
        }
        if constexpr (kPairs) {
            Tile::pack_value_pairs(values, tokens, t_.head_dim, s_.values);
        } else {
            Tile::pack_values(values, tokens, t_.head_dim, s_.values);
        }
        const TileRows packed{s_.values, t_.head_dim};
        const int blocks = (rows_ + kMaxTileRows - 1) / kMaxTileRows;  // of rows, as even as they divide
        for (int i = 0; i < blocks; ++i) {
            // The next tile arrives beside the products of this one.
            const int first = kTileTokens * i / blocks, last = kTileTokens * (i + 1) / blocks;
            keys.ask(first, last, t_.head_dim);
            values.ask(first, last, t_.head_dim);
            const int row = rows_ * i / blocks;
            attend_rows(begin, tokens, head, row, rows_ * (i + 1) / blocks - row, packed);
        }
    }

    // Spreads the tokens of later items evenly over the row blocks of this one, as many as memory answers by
    // then and as the L2 keeps.
    void plan_later() {
        if (item_.num_later == 0) return;
        int32_t tokens = 0;
        for (int32_t i = 0; i < item_.num_later; ++i) {
            const AttentionItem& item = item_.later[i * item_.later_step];
            tokens += item.end - item.begin;
        }
        const int32_t tiles = (item_.end - item_.begin + kTileTokens - 1) / kTileTokens;
        const int32_t blocks =
            (rows_ + kMaxTileRows - 1) / kMaxTileRows * tiles * (item_.head_end - item_.head_begin);
        const int32_t wanted = (tokens + blocks - 1) / blocks;
        later_per_block_ = wanted < kMostLater ? wanted : kMostLater;
        later_token_ = item_.later->begin;
    }

    void ask_later() {
        for (int32_t count = 0; count < later_per_block_ && later_ < item_.num_later; ++count) {
            const AttentionItem& item = item_.later[later_ * item_.later_step];
            const int64_t at = offset(item, later_token_, item.head_begin);
            const T* keys = static_cast<const T*>(t_.keys) + at;
            const T* values = static_cast<const T*>(t_.values) + at;
            const int32_t elements = (item.head_end - item.head_begin) * t_.head_dim;
            for (int32_t i = 0; i < elements; i += 64 / int32_t(sizeof(T))) {
                Tile::prefetch(keys + i);
                Tile::prefetch(values + i);
            }
            if (++later_token_ < item.end) continue;
            if (++later_ < item_.num_later) later_token_ = item_.later[later_ * item_.later_step].begin;
        }
    }

    // Scores, weights and sums of a few rows, over keys that are packed and values that may be.
    template <class Values>
    void attend_rows(int32_t begin, int tokens, int32_t head, int row, int count, const Values& values) {
        const int64_t d = t_.head_dim, state = int64_t(head - item_.head_begin) * rows_ + row;
        const int columns = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
        int limits[kMaxTileRows];
        for (int r = 0; r < count; ++r) {
            const int32_t visible = item_.members[(row + r) / group_].visible - begin;
            limits[r] = visible < tokens ? visible : tokens;
        }
        const TileRows keys{s_.keys, kTileTokens};
        float* output = s_.output + state * d;
        Tile::template product<kPairs, false>(count, kPairs ? t_.head_dim / 2 : t_.head_dim,
                                              s_.query + state * d, d, keys, s_.scores, kTileTokens, columns);
        ask_later();  // here, because memory answers slower than a longer burst would ask
        const typename Tile::Softmax softmax{s_.reference + state, s_.sum + state * kSumLanes, output,
                                             kPairs ? t_.scale : 1, t_.head_dim};
        constexpr bool kPairsOfWeights = kPairs && std::is_same_v<Values, TileRows>;
        softmax.template weigh<kPairsOfWeights>(count, s_.scores, columns, limits);
        Tile::template product<kPairsOfWeights, true>(count, kPairsOfWeights ? (tokens + 1) / 2 : tokens,
                                                      s_.scores, kTileTokens, values, output, d, t_.head_dim);
    }

    void store_head(int32_t head) {
        for (int32_t m = 0; m < item_.num_members; ++m) {
            for (int32_t g = 0; g < group_; ++g) {
                const int64_t state = int64_t(head - item_.head_begin) * rows_ + m * group_ + g;
                store_row(item_.members[m], head * group_ + g, s_.output + state * t_.head_dim,
                          s_.reference[state], sum_of(s_.sum + state * kSumLanes));
            }
        }
    }

    static float sum_of(const float* lanes) {
        Reg total = V::load(lanes);
        for (int i = W; i < kSumLanes; i += W) total = V::add(total, V::load(lanes + i));
        return V::hsum(total);
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
            float& weight = partials.max_sums[2 * index(p)];
            weight = power(weight - max);
            sum += weight * partials.max_sums[2 * index(p) + 1];
        }
        const Reg factor = V::set1(1 / sum);
        for (int32_t d = 0; d < tensors.head_dim; d += 16) {
            Reg total[16 / W];
            for (Reg& reg : total) reg = V::zero();
            for (int32_t p = 0; p < num_parts; ++p) {
                const Reg weight = V::set1(partials.max_sums[2 * index(p)]);
                const float* from = partials.numerators + index(p) * tensors.head_dim + d;
                for (int i = 0; i < 16 / W; ++i) total[i] = V::fmadd(weight, V::load(from + i * W), total[i]);
            }
            for (int i = 0; i < 16 / W; ++i) Tile::store(output + d + i * W, V::mul(factor, total[i]));
        }
    }

    const AttentionTensors& t_;
    const AttentionItem& item_;
    const AttentionPartials& partials_;
    const AttentionScratch& s_;
    const int32_t group_;
    const int32_t rows_;
    const int64_t token_stride_;
    int32_t later_per_block_ = 0;  // tokens
    int32_t later_ = 0;            // which of them comes next,
    int32_t later_token_ = 0;      // and at which token
};

}  // namespace parrot::cpu
