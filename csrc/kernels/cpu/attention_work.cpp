#include "kernels/cpu/attention_work.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>

#include "concat.h"
#include "kernels/cpu/parallel.h"

namespace parrot::cpu {
namespace {

constexpr int32_t kItemRows = 96;                // query rows per KV head of an item
constexpr int64_t kStateBytes = 256 << 10;       // of an item's queries and sums: an eighth of an L2
constexpr int32_t kMinSplitTokens = 256;         // of the context of a prefill block
constexpr int32_t kMinDecodeTokens = 128;        // of a part of a sequence that decodes alone
constexpr int64_t kItemsPerThread = 3;           // that splitting a prefill aims at
constexpr int32_t kWorkersPerThread[] = {2, 4};  // that decodes are planned for, see plan_decodes
constexpr int64_t kTokenCost = 12;               // rows' worth of time that reading a token takes
constexpr int64_t kMostCost = int64_t{1} << 61;  // that is counted, so that sums of int64 hold
constexpr int32_t kMostTokens = 1 << 30;         // of a sequence, so that sums of positions fit int32
constexpr int64_t kPartCost = 27;                // tokens' worth of time that a part of a row takes besides

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) throw std::invalid_argument(concat(parts...));
}

void check(const AttentionStep& step) {
    const size_t n = step.seq_lens.size();
    require(step.query_start.size() == n + 1, "query_start has ", step.query_start.size(), " elements for ",
            n, " sequences, expected ", n + 1);
    require(step.block_tables.size() == n * static_cast<size_t>(step.max_blocks), "block_tables has ",
            step.block_tables.size(), " elements, expected [", n, ", ", step.max_blocks, "]");
    require(step.query_start[0] == 0, "query_start[0] = ", step.query_start[0], ", expected 0");
    const int64_t room = std::min(int64_t(step.max_blocks) * kBlockTokens, int64_t(kMostTokens));
    for (size_t i = 0; i < n; ++i) {
        const int64_t rows = int64_t(step.query_start[i + 1]) - step.query_start[i];
        require(rows >= 1, "query_start[", i + 1, "] = ", step.query_start[i + 1],
                ", expected more than query_start[", i, "] = ", step.query_start[i]);
        require(step.seq_lens[i] >= rows && step.seq_lens[i] <= room, "seq_lens[", i,
                "] = ", step.seq_lens[i], " is outside [", rows, ", ", room,
                "], from its rows in the step to the room of its block table, or 2^30");
        const int32_t* table = step.block_tables.data() + i * static_cast<size_t>(step.max_blocks);
        const int32_t used = (step.seq_lens[i] + kBlockTokens - 1) / kBlockTokens;
        for (int32_t b = 0; b < used; ++b) {
            require(table[b] >= 0 && table[b] < step.num_blocks, "block_tables[", i, ", ", b,
                    "] = ", table[b], " is outside [0, ", step.num_blocks, "), the blocks of the cache");
        }
    }
}

class Builder {
  public:
    Builder(const AttentionShape& shape, const AttentionStep& step, const AttentionOptions& options,
            AttentionPlanner& planner)
        : shape_(shape), step_(step), options_(options), planner_(planner) {}

    AttentionWork build() {
        std::vector<int32_t> decodes;
        for (size_t i = 0; i < step_.seq_lens.size(); ++i) {
            if (num_rows(i) == 1) decodes.push_back(static_cast<int32_t>(i));
        }
        add_decodes(decodes);
        add_prefills();
        std::stable_sort(work_.items.begin(), work_.items.end(),
                         [](const auto& a, const auto& b) { return a.cost > b.cost; });
        for (const AttentionWorkItem& item : work_.items) {
            const int32_t heads = item.head_end - item.head_begin;
            work_.max_states = std::max(work_.max_states, heads * item.num_members * shape_.group_size());
            work_.cost = std::min(kMostCost, work_.cost + item.cost);
        }
        return std::move(work_);
    }

  private:
    int32_t num_rows(size_t sequence) const {
        return step_.query_start[sequence + 1] - step_.query_start[sequence];
    }

    const int32_t* table(int32_t sequence) const {
        return step_.block_tables.data() + int64_t(sequence) * step_.max_blocks;
    }

    // KV heads that an item of the decodes covers. All of them, where their state fits the cache: a block's
    // heads lie side by side, and are then read as one stream.
    int32_t heads_per_item(int32_t num_decodes) const {
        const int64_t most = std::max(kItemRows, shape_.group_size());
        const int64_t rows = std::min(most, int64_t(num_decodes) * shape_.group_size());
        const int64_t bytes = rows * shape_.head_dim * 2 * int64_t(sizeof(float));
        return static_cast<int32_t>(std::clamp<int64_t>(kStateBytes / bytes, 1, shape_.num_kv_heads));
    }

    // The planner takes every entry of a length for equally long, as a GPU does. Here one with many members
    // is much longer, so the plan is for more workers than there are threads, and these take the entries as
    // they come, the most expensive first. For how many: whose threads end soonest.
    const AttentionPlan& plan_decodes(const std::vector<int32_t>& decodes, int32_t num_head_groups) {
        std::vector<int32_t> tables, lens;
        for (const int32_t i : decodes) {
            tables.insert(tables.end(), table(i), table(i) + step_.max_blocks);
            lens.push_back(step_.seq_lens[static_cast<size_t>(i)]);
        }
        AttentionPlanOptions options;
        options.block_size = kBlockTokens;
        options.group_size = shape_.group_size();
        options.num_kv_heads = num_head_groups;
        options.max_rows = std::max(kItemRows, shape_.group_size());
        options.min_shared_tokens = options_.min_shared_tokens;
        options.share = options_.share;
        int32_t best = 1;
        int64_t soonest = std::numeric_limits<int64_t>::max();
        for (const int32_t workers : kWorkersPerThread) {
            if (options_.num_threads == 1) break;
            options.num_workers = workers * options_.num_threads;
            const int64_t end = end_of(planner_.plan(tables, lens, options), num_head_groups);
            if (end < soonest) {
                soonest = end;
                best = options.num_workers;
            }
        }
        options.num_workers = best;
        return planner_.plan(tables, lens, options);
    }

    // When the last thread is done with the entries of a plan, in tokens read by one row of one head.
    int64_t end_of(const AttentionPlan& plan, int32_t num_head_groups) const {
        std::vector<int64_t> costs;
        for (size_t e = 0; e < plan.entries.size(); e += 8) {
            const int64_t rows = int64_t(plan.entries[e + 4]) * shape_.group_size();
            const int64_t tokens = plan.entries[e + 2] - plan.entries[e + 1];
            const int64_t cost = tokens * (rows + kTokenCost) + kPartCost * rows;
            costs.insert(costs.end(), static_cast<size_t>(num_head_groups), cost);
        }
        std::ranges::sort(costs, std::greater<>());
        std::vector<int64_t> ends(static_cast<size_t>(options_.num_threads));  // a heap, the soonest first
        for (const int64_t cost : costs) {
            std::ranges::pop_heap(ends, std::greater<>());
            ends.back() += cost;
            std::ranges::push_heap(ends, std::greater<>());
        }
        return *std::ranges::max_element(ends);
    }

    void add_decodes(const std::vector<int32_t>& decodes) {
        if (decodes.empty()) return;
        const int32_t heads = heads_per_item(static_cast<int32_t>(decodes.size()));
        const int32_t num_head_groups = (shape_.num_kv_heads + heads - 1) / heads;
        if (decodes.size() == 1) return add_lone_decode(decodes[0], heads, num_head_groups);
        const AttentionPlan& plan = plan_decodes(decodes, num_head_groups);
        std::vector<int32_t> units(decodes.size(), -1);
        for (size_t i = 0; i < decodes.size(); ++i) {
            const int32_t parts = plan.part_begin[i + 1] - plan.part_begin[i];
            if (parts == 1) continue;
            units[i] = static_cast<int32_t>(work_.units.size());
            const int32_t row = step_.query_start[static_cast<size_t>(decodes[i])];
            work_.units.push_back({row, 1, plan.part_begin[i], parts, parts * num_head_groups});
        }
        work_.num_partials = plan.part_begin.back();
        work_.num_sharing = count_sharing(plan, decodes.size());
        for (size_t e = 0; e < plan.entries.size(); e += 8)
            add_entry(plan, &plan.entries[e], decodes, units, heads);
    }

    // A sequence that decodes alone: the same number of blocks to each thread. The planner cuts at multiples
    // of a tile, of which a short sequence has too few to be even.
    void add_lone_decode(int32_t sequence, int32_t heads, int32_t num_head_groups) {
        const auto i = static_cast<size_t>(sequence);
        const int32_t length = step_.seq_lens[i], blocks = (length + kBlockTokens - 1) / kBlockTokens;
        const int32_t parts =
            std::clamp(options_.num_threads / num_head_groups, 1, std::max(1, length / kMinDecodeTokens));
        if (parts > 1) {
            work_.units.push_back({step_.query_start[i], 1, 0, parts, parts * num_head_groups});
            work_.num_partials = parts;
        }
        for (int32_t part = 0; part < parts; ++part) {
            const auto member = static_cast<int32_t>(work_.members.size());
            work_.members.push_back(
                {step_.query_start[i], length, parts > 1 ? part : -1, parts > 1 ? 0 : -1});
            const Slice range = slice_of(blocks, part, parts);
            const auto begin = static_cast<int32_t>(range.begin) * kBlockTokens;
            const auto end = std::min(length, static_cast<int32_t>(range.end) * kBlockTokens);
            for (int32_t head = 0; head < shape_.num_kv_heads; head += heads) {
                add_item(table(sequence), begin, end, member, 1, head,
                         std::min(head + heads, shape_.num_kv_heads));
            }
        }
    }

    static int32_t count_sharing(const AttentionPlan& plan, size_t num_decodes) {
        std::vector<char> shares(num_decodes, 0);
        for (size_t e = 0; e < plan.entries.size(); e += 8) {
            const int32_t* entry = &plan.entries[e];
            if (entry[4] < 2) continue;
            for (int32_t m = entry[3]; m < entry[3] + entry[4]; ++m) {
                shares[static_cast<size_t>(plan.members[2 * static_cast<size_t>(m)])] = 1;
            }
        }
        return static_cast<int32_t>(std::ranges::count(shares, 1));
    }

    void add_entry(const AttentionPlan& plan, const int32_t* entry, const std::vector<int32_t>& decodes,
                   const std::vector<int32_t>& units, int32_t heads) {
        const auto first = static_cast<int32_t>(work_.members.size());
        for (int32_t m = entry[3]; m < entry[3] + entry[4]; ++m) {
            const int32_t request = plan.members[2 * static_cast<size_t>(m)];
            const auto sequence = static_cast<size_t>(decodes[static_cast<size_t>(request)]);
            work_.members.push_back({step_.query_start[sequence], step_.seq_lens[sequence],
                                     plan.members[2 * static_cast<size_t>(m) + 1],
                                     units[static_cast<size_t>(request)]});
        }
        const int32_t* blocks = table(decodes[static_cast<size_t>(entry[0])]);
        for (int32_t head = 0; head < shape_.num_kv_heads; head += heads) {
            add_item(blocks, entry[1], entry[2], first, entry[4], head,
                     std::min(head + heads, shape_.num_kv_heads));
        }
    }

    void add_item(const int32_t* blocks, int32_t begin, int32_t end, int32_t first_member,
                  int32_t num_members, int32_t head_begin, int32_t head_end) {
        const int64_t rows = int64_t(num_members) * shape_.group_size();
        const int64_t cost = (end - begin) * (rows + kTokenCost) * (head_end - head_begin);
        work_.items.push_back({blocks, begin, end, first_member, num_members, head_begin, head_end, cost});
    }

    // Query tokens of a prefill item.
    int32_t block_rows() const { return std::max(1, kItemRows / shape_.group_size()); }

    void add_prefills() {
        int64_t total = 0;
        for (size_t i = 0; i < step_.seq_lens.size(); ++i) {
            if (num_rows(i) > 1) total += int64_t(num_rows(i)) * step_.seq_lens[i];
        }
        total = std::min(total, kMostCost / shape_.num_kv_heads) * shape_.num_kv_heads;
        const int64_t target = std::max<int64_t>(1, total / (options_.num_threads * kItemsPerThread));
        for (size_t i = 0; i < step_.seq_lens.size(); ++i) {
            if (num_rows(i) == 1) continue;
            for (int32_t row = 0; row < num_rows(i); row += block_rows()) {
                add_query_block(static_cast<int32_t>(i), row, std::min(block_rows(), num_rows(i) - row),
                                target);
            }
        }
    }

    // Rows [row, row + count) of a sequence, over the tokens that its last row sees; over several ranges of
    // them where there is too little else to keep the threads busy.
    void add_query_block(int32_t sequence, int32_t row, int32_t count, int64_t target) {
        const auto i = static_cast<size_t>(sequence);
        const int32_t first_visible = step_.seq_lens[i] - num_rows(i) + row + 1;
        const int32_t tokens = first_visible + count - 1;
        const auto wanted = static_cast<int32_t>((int64_t(tokens) * count + target - 1) / target);
        const int32_t most = std::clamp(wanted, 1, std::max(1, tokens / kMinSplitTokens));
        const int32_t length = (tokens + most - 1) / most;
        const int32_t step = (length + kTileTokens - 1) / kTileTokens * kTileTokens;
        const int32_t splits = (tokens + step - 1) / step;
        int32_t unit = -1;
        if (splits > 1) {
            unit = static_cast<int32_t>(work_.units.size());
            work_.units.push_back({step_.query_start[i] + row, count, work_.num_partials, splits,
                                   splits * shape_.num_kv_heads});
        }
        for (int32_t part = 0; part < splits; ++part) {
            const auto first = static_cast<int32_t>(work_.members.size());
            for (int32_t r = 0; r < count; ++r) {
                const int32_t partial = splits > 1 ? work_.num_partials++ : -1;
                work_.members.push_back({step_.query_start[i] + row + r, first_visible + r, partial, unit});
            }
            for (int32_t head = 0; head < shape_.num_kv_heads; ++head) {
                add_item(table(sequence), part * step, std::min(tokens, (part + 1) * step), first, count,
                         head, head + 1);
            }
        }
    }

    const AttentionShape& shape_;
    const AttentionStep& step_;
    const AttentionOptions& options_;
    AttentionPlanner& planner_;
    AttentionWork work_;
};

}  // namespace

AttentionWork make_attention_work(const AttentionShape& shape, const AttentionStep& step,
                                  const AttentionOptions& options, AttentionPlanner& planner) {
    check(step);
    return Builder(shape, step, options, planner).build();
}

}  // namespace parrot::cpu
