#include "kvcache/attention_plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>

namespace parrot {
namespace {

constexpr int32_t kEntryFields = 8;
constexpr int32_t kTileTokens = 64;  // the kernel's pipeline stage: ranges are cut at multiples of it
constexpr int32_t kEntryCost = 80;   // tokens' worth of time that an entry costs besides its tokens

// A range of tokens and the requests that attend to it.
struct Segment {
    int32_t begin, end;
    int32_t first, count;  // slice of Planner::order_
};

class Planner {
  public:
    Planner(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
            const AttentionPlanOptions& options)
        : tables_(block_tables),
          lens_(seq_lens),
          options_(options),
          num_requests_(static_cast<int32_t>(seq_lens.size())),
          max_blocks_(num_requests_ ? static_cast<int32_t>(block_tables.size() / seq_lens.size()) : 0) {}

    AttentionPlan run() {
        validate();
        order_.resize(num_requests_);
        for (int32_t r = 0; r < num_requests_; ++r) order_[r] = r;
        if (options_.share) {
            find_segments();
        } else {
            for (int32_t i = 0; i < num_requests_; ++i) add_segment(0, lens_[order_[i]], i, 1);
        }
        return emit();
    }

  private:
    int32_t block(int32_t request, int32_t index) const {
        return tables_[size_t(request) * max_blocks_ + index];
    }

    void validate() const {
        if (options_.block_size < 1 || options_.group_size < 1 || options_.num_kv_heads < 1 ||
            options_.num_workers < 1 || options_.max_rows < options_.group_size) {
            throw std::invalid_argument(
                "plan_attention: block_size, group_size, num_kv_heads and num_workers must "
                "be positive and max_rows at least group_size");
        }
        for (int32_t r = 0; r < num_requests_; ++r) {
            const int64_t room = int64_t(max_blocks_) * options_.block_size;
            if (lens_[r] < 1 || lens_[r] > room) {
                throw std::invalid_argument("seq_lens[" + std::to_string(r) +
                                            "] = " + std::to_string(lens_[r]) + " is outside [1, " +
                                            std::to_string(room) + "]");
            }
            const int32_t used = (lens_[r] + options_.block_size - 1) / options_.block_size;
            for (int32_t b = 0; b < used; ++b) {
                if (block(r, b) < 0) {
                    throw std::invalid_argument("block_tables[" + std::to_string(r) + ", " +
                                                std::to_string(b) + "] = " + std::to_string(block(r, b)) +
                                                " within seq_lens");
                }
            }
        }
    }

    // A set of requests (slice of order_) whose blocks agree before `index`; tokens from `begin` on are not
    // in a segment yet.
    struct Group {
        int32_t first, count, begin, index;
    };

    void find_segments() {
        std::vector<Group> stack{{0, num_requests_, 0, 0}};
        while (!stack.empty()) {
            Group group = stack.back();
            stack.pop_back();
            if (group.count == 1) {
                add_segment(group.begin, lens_[order_[group.first]], group.first, 1);
                continue;
            }
            const int32_t agreed = common_blocks(group);
            const int32_t end = agreed * options_.block_size;
            if (end - group.begin >= options_.min_shared_tokens) {
                add_segment(group.begin, end, group.first, group.count);
                group.begin = end;
            }
            group.index = agreed;
            split(group, stack);
        }
    }

    // First block index at which the group's members differ, or at which one of them has no full block.
    int32_t common_blocks(const Group& group) const {
        int32_t limit = max_blocks_;
        for (int32_t i = 0; i < group.count; ++i) {
            limit = std::min(limit, lens_[order_[group.first + i]] / options_.block_size);
        }
        const int32_t* lead = &tables_[size_t(order_[group.first]) * max_blocks_];
        for (int32_t i = 1; i < group.count && limit > group.index; ++i) {
            const int32_t* other = &tables_[size_t(order_[group.first + i]) * max_blocks_];
            limit = static_cast<int32_t>(
                std::mismatch(lead + group.index, lead + limit, other + group.index).first - lead);
        }
        return std::max(limit, group.index);
    }

    // Parts a group by its next block. Members without another full block, or with no token left, stand
    // alone.
    void split(const Group& group, std::vector<Group>& stack) {
        const auto first = order_.begin() + group.first;
        const int32_t begin = group.begin, index = group.index;
        const auto key = [&](int32_t request) {
            const bool full = lens_[request] / options_.block_size > index;
            return full ? block(request, index) : -1 - request;
        };
        std::stable_sort(first, first + group.count, [&](int32_t a, int32_t b) { return key(a) < key(b); });
        for (int32_t i = 0; i < group.count;) {
            int32_t j = i + 1;
            while (j < group.count && key(first[j]) == key(first[i])) ++j;
            if (lens_[first[i]] > begin || j - i > 1) stack.push_back({group.first + i, j - i, begin, index});
            i = j;
        }
    }

    void add_segment(int32_t begin, int32_t end, int32_t first, int32_t count) {
        if (end <= begin) return;
        // Later splits reorder order_ within a group, never across it, so that the slice keeps its members.
        segments_.push_back({begin, end, first, count});
    }

    int32_t num_tiles(const Segment& s) const {
        const int32_t tile_members = options_.max_rows / options_.group_size;
        return (s.count + tile_members - 1) / tile_members;
    }

    // Tokens per entry: the candidate with which the workers would be done first.
    int32_t choose_chunk() const {
        int32_t longest = kTileTokens;
        for (const Segment& s : segments_) longest = std::max(longest, s.end - s.begin);
        int32_t best = round_up(longest);
        int64_t best_time = makespan(best);
        for (int32_t chunk = best; chunk > options_.min_chunk_tokens;) {
            chunk = std::min(chunk - kTileTokens, round_up(chunk * 5 / 6));
            if (chunk < options_.min_chunk_tokens) break;
            const int64_t time = makespan(chunk);
            if (time < best_time) {
                best = chunk;
                best_time = time;
            }
        }
        return best;
    }

    static int32_t round_up(int32_t tokens) { return (tokens + kTileTokens - 1) / kTileTokens * kTileTokens; }

    // When the last worker would finish, in tokens, if workers took the entries longest first: levels of
    // equally loaded workers, filled from the lowest.
    int64_t makespan(int32_t chunk) const {
        std::vector<int64_t> entries(chunk / kTileTokens + 1, 0);  // by length in tiles
        for (const Segment& s : segments_) {
            const int32_t splits = num_splits(s, chunk);
            const int64_t copies = int64_t(num_tiles(s)) * options_.num_kv_heads;
            const int32_t per_split = round_up((s.end - s.begin + splits - 1) / splits);
            entries[per_split / kTileTokens] += copies * (splits - 1);
            entries[round_up(s.end - s.begin - (splits - 1) * per_split) / kTileTokens] += copies;
        }
        std::map<int64_t, int64_t> workers{{0, options_.num_workers}};  // load -> how many workers have it
        for (size_t tiles = entries.size() - 1; tiles > 0; --tiles) {
            const int64_t cost = int64_t(tiles) * kTileTokens + kEntryCost;
            for (int64_t left = entries[tiles]; left > 0;) {
                auto lowest = workers.extract(workers.begin());
                const int64_t taken = std::min(left, lowest.mapped());
                workers[lowest.key() + cost] += taken;
                if (taken < lowest.mapped()) workers[lowest.key()] += lowest.mapped() - taken;
                left -= taken;
            }
        }
        return workers.rbegin()->first;
    }

    AttentionPlan emit() {
        const int32_t tile_members = options_.max_rows / options_.group_size;
        const int32_t chunk = choose_chunk();
        // Longest first, so that the last entries to start are short; order_ breaks ties.
        std::stable_sort(segments_.begin(), segments_.end(), [](const Segment& a, const Segment& b) {
            return a.count != b.count ? a.count > b.count : a.end - a.begin > b.end - b.begin;
        });
        count_parts(chunk);
        AttentionPlan plan;
        plan.part_begin = part_begin_;
        std::vector<int32_t> next(part_begin_.begin(), part_begin_.end() - 1);
        for (const Segment& s : segments_) {
            for (int32_t tile = 0; tile < s.count; tile += tile_members) {
                emit_tile(plan, s, tile, std::min(tile_members, s.count - tile), chunk, next);
            }
        }
        return plan;
    }

    int32_t num_splits(const Segment& s, int32_t chunk) const {
        return std::max<int32_t>(1, (s.end - s.begin + chunk - 1) / chunk);
    }

    void count_parts(int32_t chunk) {
        part_begin_.assign(num_requests_ + 1, 0);
        for (const Segment& s : segments_) {
            for (int32_t i = 0; i < s.count; ++i)
                part_begin_[order_[s.first + i] + 1] += num_splits(s, chunk);
        }
        for (int32_t r = 0; r < num_requests_; ++r) part_begin_[r + 1] += part_begin_[r];
    }

    void emit_tile(AttentionPlan& plan, const Segment& s, int32_t tile, int32_t count, int32_t chunk,
                   std::vector<int32_t>& next) const {
        const int32_t splits = num_splits(s, chunk);
        const int32_t per_split = round_up((s.end - s.begin + splits - 1) / splits);
        for (int32_t k = 0; k < splits; ++k) {
            const int32_t begin = std::min(s.end, s.begin + k * per_split);
            const int32_t end = std::min(s.end, begin + per_split);
            const int32_t first_member = static_cast<int32_t>(plan.members.size() / 2);
            for (int32_t i = 0; i < count; ++i) {
                const int32_t request = order_[s.first + tile + i];
                const bool whole = part_begin_[request + 1] - part_begin_[request] == 1;
                plan.members.insert(plan.members.end(), {request, whole ? -1 : next[request]++});
            }
            const int32_t lead = order_[s.first + tile], part = plan.members[2 * first_member + 1];
            plan.entries.insert(plan.entries.end(), {lead, begin, end, first_member, count, part, 0, 0});
        }
    }

    std::span<const int32_t> tables_;
    std::span<const int32_t> lens_;
    AttentionPlanOptions options_;
    int32_t num_requests_;
    int32_t max_blocks_;
    std::vector<int32_t> order_;
    std::vector<Segment> segments_;
    std::vector<int32_t> part_begin_;
};

}  // namespace

AttentionPlan plan_attention(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                             const AttentionPlanOptions& options) {
    return Planner(block_tables, seq_lens, options).run();
}

}  // namespace parrot
