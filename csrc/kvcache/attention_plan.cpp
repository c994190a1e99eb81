#include "kvcache/attention_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace parrot {
namespace {

constexpr int32_t kTileTokens = 64;  // the kernel's pipeline stage: ranges are cut at multiples of it
constexpr int32_t kEntryCost = 80;   // tokens' worth of time that an entry costs besides its tokens

int32_t ceil_div(int32_t value, int32_t divisor) {
    return static_cast<int32_t>((int64_t{value} + divisor - 1) / divisor);  // any int32 may come as an option
}
int32_t num_tiles(int32_t tokens) { return ceil_div(tokens, kTileTokens); }

int64_t entry_time(int32_t tiles) { return static_cast<int64_t>(tiles) * kTileTokens + kEntryCost; }

void check(const AttentionPlanOptions& options) {
    if (options.block_size < 1 || options.group_size < 1 || options.num_kv_heads < 1 ||
        options.num_workers < 1 || options.max_rows < options.group_size) {
        throw std::invalid_argument(
            "plan_attention: block_size, group_size, num_kv_heads and num_workers must be positive and "
            "max_rows "
            "at least group_size");
    }
}

}  // namespace

const AttentionPlan& AttentionPlanner::plan(std::span<const int32_t> block_tables,
                                            std::span<const int32_t> seq_lens,
                                            const AttentionPlanOptions& options) {
    check(options);
    options_ = options;
    segments_.update(block_tables, seq_lens, options.block_size, options.min_shared_tokens, options.share);
    collect_loads();
    chunk_tiles_ = choose_chunk_tiles();
    emit();
    return plan_;
}

int32_t AttentionPlanner::num_member_tiles(const AttentionSegment& segment) const {
    return ceil_div(segment.count, options_.max_rows / options_.group_size);
}

// Even entries of at most a chunk; rounding them up to tiles may make fewer do.
AttentionPlanner::Cut AttentionPlanner::cut(int32_t tiles, int32_t chunk_tiles) {
    const int32_t each = ceil_div(tiles, ceil_div(tiles, chunk_tiles));
    return {ceil_div(tiles, each), each};
}

AttentionPlanner::Cut AttentionPlanner::cut(const AttentionSegment& segment) const {
    return cut(num_tiles(segment.end - segment.begin), chunk_tiles_);
}

// Only the length in tiles matters to the balance, and many segments have the same.
void AttentionPlanner::collect_loads() {
    loads_.clear();
    for (const AttentionSegment& s : segments_.segments()) {
        loads_.push_back(
            {num_tiles(s.end - s.begin), static_cast<int64_t>(num_member_tiles(s)) * options_.num_kv_heads});
    }
    std::sort(loads_.begin(), loads_.end(), [](const Load& a, const Load& b) { return a.tiles > b.tiles; });
    size_t num_kept = 0;
    for (const Load& load : loads_) {
        if (num_kept > 0 && loads_[num_kept - 1].tiles == load.tiles) {
            loads_[num_kept - 1].copies += load.copies;
        } else {
            loads_[num_kept++] = load;
        }
    }
    loads_.resize(num_kept);
}

// Tiles per entry: the candidate with which the workers would be done first.
int32_t AttentionPlanner::choose_chunk_tiles() {
    const int32_t longest = loads_.empty() ? 1 : loads_.front().tiles;
    int32_t best = longest;
    int64_t best_time = makespan(best);
    const int32_t least = ceil_div(std::max(options_.min_chunk_tokens, 1), kTileTokens);
    for (int32_t chunk = longest; chunk > least;) {
        chunk = std::min(chunk - 1, ceil_div(chunk * 5, 6));
        if (chunk < least) break;
        if (least_time(chunk) >= best_time) continue;
        const int64_t time = makespan(chunk);
        if (time < best_time) {
            best = chunk;
            best_time = time;
        }
    }
    return best;
}

// No schedule of these entries ends sooner: the work divided evenly.
int64_t AttentionPlanner::least_time(int32_t chunk_tiles) const {
    int64_t work = 0;
    for (const Load& load : loads_) {
        const int32_t count = cut(load.tiles, chunk_tiles).count;
        work += load.copies *
                (static_cast<int64_t>(load.tiles) * kTileTokens + static_cast<int64_t>(count) * kEntryCost);
    }
    return (work + options_.num_workers - 1) / options_.num_workers;
}

// When the last worker would finish, in tokens, if workers took the entries longest first: levels of equally
// loaded workers, filled from the lowest.
int64_t AttentionPlanner::makespan(int32_t chunk_tiles) {
    entries_by_tiles_.assign(static_cast<size_t>(chunk_tiles) + 1, 0);
    for (const Load& load : loads_) {
        const auto [count, tiles] = cut(load.tiles, chunk_tiles);
        const int32_t rest = load.tiles - (count - 1) * tiles;
        entries_by_tiles_[static_cast<size_t>(tiles)] += load.copies * (count - 1);
        entries_by_tiles_[static_cast<size_t>(rest)] += load.copies;
    }
    const auto lowest_first = std::greater<>();
    workers_.assign(1, {0, options_.num_workers});
    int64_t latest = 0;
    for (int32_t tiles = chunk_tiles; tiles > 0; --tiles) {
        for (int64_t left = entries_by_tiles_[static_cast<size_t>(tiles)]; left > 0;) {
            std::pop_heap(workers_.begin(), workers_.end(), lowest_first);
            const auto [load, count] = workers_.back();
            workers_.pop_back();
            // Alone at their level, they take whole rounds at once.
            const int64_t rounds = workers_.empty() ? std::max<int64_t>(1, left / count) : 1;
            const int64_t taken = std::min(left, count);
            const int64_t after = load + rounds * entry_time(tiles);
            latest = std::max(latest, after);
            workers_.push_back({after, taken});
            std::push_heap(workers_.begin(), workers_.end(), lowest_first);
            if (taken < count) {
                workers_.push_back({load, count - taken});
                std::push_heap(workers_.begin(), workers_.end(), lowest_first);
            }
            left -= rounds * taken;
        }
    }
    return latest;
}

void AttentionPlanner::emit() {
    order_segments();
    count_parts();
    plan_.entries.clear();
    plan_.members.clear();
    next_part_.assign(plan_.part_begin.begin(), plan_.part_begin.end() - 1);
    const int32_t tile_members = options_.max_rows / options_.group_size;
    for (const int32_t index : sorted_) {
        const AttentionSegment& s = segments_.segments()[static_cast<size_t>(index)];
        for (int32_t tile = 0; tile < s.count; tile += tile_members) {
            emit_tile(s, tile, std::min(tile_members, s.count - tile));
        }
    }
}

// Longest first, so that the last entries to start are short; the order of the segments breaks ties.
void AttentionPlanner::order_segments() {
    const std::vector<AttentionSegment>& segments = segments_.segments();
    sorted_.resize(segments.size());
    std::iota(sorted_.begin(), sorted_.end(), 0);
    std::sort(sorted_.begin(), sorted_.end(), [&](int32_t one, int32_t other) {
        const AttentionSegment& a = segments[static_cast<size_t>(one)];
        const AttentionSegment& b = segments[static_cast<size_t>(other)];
        if (a.count != b.count) return a.count > b.count;
        if (a.end - a.begin != b.end - b.begin) return a.end - a.begin > b.end - b.begin;
        return one < other;
    });
}

void AttentionPlanner::count_parts() {
    std::vector<int32_t>& begin = plan_.part_begin;
    begin.assign(static_cast<size_t>(segments_.num_requests()) + 1, 0);
    for (const AttentionSegment& s : segments_.segments()) {
        const int32_t count = cut(s).count;
        for (int32_t i = 0; i < s.count; ++i) {
            begin[static_cast<size_t>(segments_.order()[static_cast<size_t>(s.first + i)]) + 1] += count;
        }
    }
    std::partial_sum(begin.begin(), begin.end(), begin.begin());
}

void AttentionPlanner::emit_tile(const AttentionSegment& s, int32_t tile, int32_t count) {
    const int32_t* members = &segments_.order()[static_cast<size_t>(s.first + tile)];
    const auto [num_entries, tiles] = cut(s);
    for (int32_t k = 0; k < num_entries; ++k) {
        const int32_t begin = s.begin + k * tiles * kTileTokens;
        const int32_t end =
            s.end - begin <= int64_t{tiles} * kTileTokens ? s.end : begin + tiles * kTileTokens;
        const size_t first_member = plan_.members.size() / 2;
        for (int32_t i = 0; i < count; ++i) {
            const auto request = static_cast<size_t>(members[i]);
            const bool whole = plan_.part_begin[request + 1] - plan_.part_begin[request] == 1;
            plan_.members.push_back(members[i]);
            plan_.members.push_back(whole ? -1 : next_part_[request]++);
        }
        const int32_t part = plan_.members[2 * first_member + 1];
        plan_.entries.insert(plan_.entries.end(),
                             {members[0], begin, end, static_cast<int32_t>(first_member), count, part, 0, 0});
    }
}

AttentionPlan plan_attention(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                             const AttentionPlanOptions& options) {
    AttentionPlanner planner;
    return planner.plan(block_tables, seq_lens, options);
}

}  // namespace parrot
