// One work item of the attention: its loop over tiles of 64 tokens, and the merge of parts (see
// attention_tile.h for V).
#pragma once

#include <cstddef>

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
    using Block = KvBlock<T>;
    static constexpr int32_t kMostLater = 24;  // lines of later keys, and of values, to ask for at a time
    // Products of bfloat16 pairs: queries are kept as they are, and scores scaled instead of them; weights
    // are rounded, as kernels on GPUs round them.
    static constexpr bool kPairs = V::kDotsPairs && Block::kPair == 2;
    static constexpr bool kWidens = !V::kDotsPairs && Block::kPair == 2;
    static constexpr Words kWords = kPairs ? Words::kPairs : kWidens ? Words::kPairsOnRight : Words::kNumbers;

    AttentionItemKernel(const AttentionTensors& tensors, const AttentionItem& item,
                        const AttentionPartials& partials, const AttentionScratch& scratch)
        : t_(tensors),
          item_(item),
          partials_(partials),
          s_(scratch),
          group_(tensors.num_heads / tensors.num_kv_heads),
          rows_(item.num_members * group_) {}

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

    // A head of a block of `cache`, in words.
    const float* words(const void* cache, const AttentionItem& item, int32_t position, int32_t head) const {
        const int64_t at =
            Block::head_at(item.block_table[position / kBlockTokens], head, t_.num_kv_heads, t_.head_dim);
        return reinterpret_cast<const float*>(static_cast<const T*>(cache) + at);
    }

    // Where tokens from `begin` on lie. A block past the item's end is replaced by what stands there already.
    void find(const AttentionItem& item, int32_t begin, int32_t head, TileBlocks& tile) const {
        for (unsigned i = 0; i < TileBlocks::kBlocks; ++i) {
            const int32_t position = begin + int32_t(i) * kBlockTokens;
            if (position >= item.end) break;
            tile.runs[i] = words(t_.keys, item, position, head);
            tile.runs[TileBlocks::kBlocks + i] = words(t_.values, item, position, head);
        }
    }

    TileBlocks tile_at(int32_t begin, int32_t head) const {
        TileBlocks tile;
        for (unsigned i = 0; i < TileBlocks::kBlocks; ++i) {
            tile.runs[i] = words(t_.keys, item_, begin, head);
            tile.runs[TileBlocks::kBlocks + i] = words(t_.values, item_, begin, head);
        }
        find(item_, begin, head, tile);
        return tile;
    }

    // What comes after `tile`: the next head's, the next tokens', or the next item's.
    TileBlocks tile_after(const TileBlocks& tile, int32_t begin, int32_t head) const {
        TileBlocks next = tile;
        if (head + 1 < item_.head_end) {
            find(item_, begin, head + 1, next);
        } else if (begin + kTileTokens < item_.end) {
            find(item_, begin + kTileTokens, item_.head_begin, next);
        } else if (item_.next != nullptr) {
            find(*item_.next, item_.next->begin, item_.next->head_begin, next);
        }
        return next;
    }

    void run_tile(int32_t begin, int tokens, int32_t head) {
        const TileBlocks tile = tile_at(begin, head), next = tile_after(tile, begin, head);
        const KeyRows keys{tile};
        const ValueRows<T> values{tile, t_.head_dim};
        if (rows_ <= kMaxTileRows) {
            attend_rows<kWords>(begin, tokens, head, 0, rows_, keys, values, TileAhead{next, 0});
            return;
        }
        if constexpr (kWidens) {
            Tile::widen(keys, t_.head_dim / Block::kPair, kTileTokens, s_.keys);
            Tile::widen(values, (tokens + 1) / Block::kPair, t_.head_dim, s_.values);
        }
        const int row_blocks = (rows_ + kMaxTileRows - 1) / kMaxTileRows;  // as even as they divide
        const int lines = int(TileBlocks::kRuns) * Block::lines(t_.head_dim);
        for (int i = 0; i < row_blocks; ++i) {
            // The next tile arrives beside the products of this one.
            for (int line = lines * i / row_blocks; line < lines * (i + 1) / row_blocks; ++line)
                next.ask(line);
            const int row = rows_ * i / row_blocks, count = rows_ * (i + 1) / row_blocks - row;
            if constexpr (kWidens) {
                attend_rows<Words::kNumbers>(begin, tokens, head, row, count, TileRows{s_.keys, kTileTokens},
                                             TileRows{s_.values, t_.head_dim}, NothingAhead());
            } else {
                attend_rows<kWords>(begin, tokens, head, row, count, keys, values, NothingAhead());
            }
        }
    }

    // Spreads the lines of later items evenly over the row blocks of this one, as many as memory answers by
    // then and as the L2 keeps.
    void plan_later() {
        if (item_.num_later == 0) return;
        int32_t lines = 0;
        for (int32_t i = 0; i < item_.num_later; ++i) {
            const AttentionItem& item = item_.later[i * item_.later_step];
            lines += (item.end - item.begin + kBlockTokens - 1) / kBlockTokens * lines_of_block(item);
        }
        const int32_t tiles = (item_.end - item_.begin + kTileTokens - 1) / kTileTokens;
        const int32_t row_blocks =
            (rows_ + kMaxTileRows - 1) / kMaxTileRows * tiles * (item_.head_end - item_.head_begin);
        const int32_t wanted = (lines + row_blocks - 1) / row_blocks;
        later_per_block_ = wanted < kMostLater ? wanted : kMostLater;
        later_.position = item_.later->begin;
    }

    // Of keys, or of values: the heads of a block lie side by side.
    int32_t lines_of_block(const AttentionItem& item) const {
        return (item.head_end - item.head_begin) * Block::lines(t_.head_dim);
    }

    void ask_later() {
        for (int32_t asked = 0; asked < later_per_block_ && later_.index < item_.num_later;) {
            const AttentionItem& item = item_.later[later_.index * item_.later_step];
            const float* keys = words(t_.keys, item, later_.position, item.head_begin);
            const float* values = words(t_.values, item, later_.position, item.head_begin);
            const int32_t lines = lines_of_block(item);
            for (; later_.line < lines && asked < later_per_block_; ++later_.line, ++asked) {
                __builtin_prefetch(keys + later_.line * TileBlocks::kLineWords, 0, 2);
                __builtin_prefetch(values + later_.line * TileBlocks::kLineWords, 0, 2);
            }
            if (later_.line < lines) return;
            later_.line = 0;
            later_.position += kBlockTokens;
            if (later_.position >= item.end) next_later();
        }
    }

    void next_later() {
        if (++later_.index < item_.num_later)
            later_.position = item_.later[later_.index * item_.later_step].begin;
    }

    // Scores, weights and sums of a few rows.
    template <Words kTileWords, class Keys, class Values, class Ahead>
    void attend_rows(int32_t begin, int tokens, int32_t head, int row, int count, const Keys& keys,
                     const Values& values, const Ahead& ahead) {
        constexpr int kPerWord = kTileWords == Words::kNumbers ? 1 : 2;
        const int64_t state = int64_t(head - item_.head_begin) * rows_ + row;
        const int columns = (tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
        int limits[kMaxTileRows];
        for (int r = 0; r < count; ++r) {
            const int32_t visible = item_.members[(row + r) / group_].visible - begin;
            limits[r] = visible < tokens ? visible : tokens;
        }
        const int d = t_.head_dim, depth = d / kPerWord;
        float* output = s_.output + state * d;
        Tile::template product<kTileWords, false>(count, depth, s_.query + state * d, d, keys, s_.scores,
                                                  kTileTokens, columns, ahead);
        ask_later();  // here, because memory answers slower than a longer burst would ask
        const typename Tile::Softmax softmax{s_.reference + state, s_.sum + state * kSumLanes, output,
                                             kPairs ? t_.scale : 1, d};
        softmax.template weigh<kPairs>(count, s_.scores, columns, limits);
        const int whole = tokens / kPerWord;
        Tile::template product<kTileWords, true>(count, whole, s_.scores, kTileTokens, values, output, d, d,
                                                 ahead.after(unsigned(columns / 16 * depth)));
        if (whole * kPerWord == tokens) return;
        // The last token's partner is no token, and what lies there may be no number.
        alignas(64) float last[kMaxHeadDim];
        Tile::keep_firsts(values.at(whole, 0), d, last);
        Tile::template product<kTileWords, true>(count, 1, s_.scores + (kPairs ? whole : tokens - 1),
                                                 kTileTokens, TileRows{last, d}, output, d, d,
                                                 NothingAhead());
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
    int32_t later_per_block_ = 0;  // lines of keys, and of values
    struct {
        int32_t index, position, line;
    } later_{};  // which item comes next, which block and which of its lines
};

}  // namespace parrot::cpu
