#include "kvcache/attention_plan.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "concat.h"

namespace parrot {
namespace {

constexpr int32_t kTileTokens = 64;    // the kernel's pipeline stage: ranges are cut at multiples of it
constexpr int32_t kMaxCost = 1 << 20;  // tokens; what an entry is taken to cost at most, so that sums hold
constexpr int64_t kMaxUnits = 4096;    // of the longest entry's time, in which a makespan is counted

int32_t ceil_div(int32_t value, int32_t divisor) {
    return static_cast<int32_t>((int64_t{value} + divisor - 1) / divisor);  // any int32 may come as an option
}
int32_t num_tiles(int32_t tokens) { return ceil_div(tokens, kTileTokens); }

void check(const AttentionPlanOptions& options) {
    if (options.block_size < 1 || options.group_size < 1 || options.num_kv_heads < 1 ||
        options.num_workers < 1 || options.max_rows < options.group_size) {
        throw std::invalid_argument(
            "plan_attention: block_size, group_size, num_kv_heads and num_workers must be positive and "
            "max_rows "
            "at least group_size");
    }
    if (options.entry_tokens < 0 || options.row_tokens < 0 || options.work_percent < 0 ||
        options.work_percent > 100) {
        throw std::invalid_argument(concat(
            "plan_attention: entry_tokens = ", options.entry_tokens, " and row_tokens = ", options.row_tokens,
            " must not be negative, work_percent = ", options.work_percent, " must be in [0, 100]"));
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

int32_t AttentionPlanner::entry_cost(int32_t members) const {
    const int64_t rows = static_cast<int64_t>(members) * options_.group_size;
    const int64_t most = kMaxCost;
    if (options_.row_tokens > 0 && rows > most) return kMaxCost;
    return static_cast<int32_t>(std::min(most, options_.entry_tokens + rows * options_.row_tokens));
}

// Even entries of at most a chunk; rounding them up to tiles may make fewer do.
AttentionPlanner::Cut AttentionPlanner::cut(int32_t tiles, int32_t chunk_tiles) {
    const int32_t each = ceil_div(tiles, ceil_div(tiles, chunk_tiles));
    return {ceil_div(tiles, each), each};
}

AttentionPlanner::Cut AttentionPlanner::cut(const AttentionSegment& segment) const {
    return cut(num_tiles(segment.end - segment.begin), chunk_tiles_);
}

// Only the length in tiles and the rows matter to the balance, and many segments have the same.
void AttentionPlanner::collect_loads() {
    loads_.clear();
    const int32_t tile_members = options_.max_rows / options_.group_size;
    for (const AttentionSegment& s : segments_.segments()) {
        const int32_t tiles = num_tiles(s.end - s.begin), whole = s.count / tile_members;
        const int32_t rest = s.count - whole * tile_members;
        if (whole > 0) {
            loads_.push_back({tiles, entry_cost(tile_members), int64_t{whole} * options_.num_kv_heads});
        }
        if (rest > 0) loads_.push_back({tiles, entry_cost(rest), options_.num_kv_heads});
    }
    std::sort(loads_.begin(), loads_.end(), [](const Load& a, const Load& b) {
        return a.tiles != b.tiles ? a.tiles > b.tiles : a.cost > b.cost;
    });
    size_t num_kept = 0;
    int32_t most = 0;
    for (const Load& load : loads_) {
        most = std::max(most, load.cost);
        Load* last = num_kept > 0 ? &loads_[num_kept - 1] : nullptr;
        if (last != nullptr && last->tiles == load.tiles && last->cost == load.cost) {
            last->copies += load.copies;
        } else {
            loads_[num_kept++] = load;
        }
    }
    loads_.resize(num_kept);
    const int64_t longest = loads_.empty() ? 0 : int64_t{loads_.front().tiles} * kTileTokens + most;
    constexpr int64_t kLeastUnit = 16;
    time_unit_ = kLeastUnit * (longest / (kLeastUnit * kMaxUnits) + 1);
}

// Tiles per entry: the candidate with which the workers would be done first.
int32_t AttentionPlanner::choose_chunk_tiles() {
    const int32_t longest = loads_.empty() ? 1 : loads_.front().tiles;
    const auto time = [&](int32_t chunk, int64_t even) {
        const int64_t last = makespan(chunk), wait = last - even, percent = options_.work_percent;
        return last - wait / 100 * percent - wait % 100 * percent / 100;  // the product may overflow
    };
    int32_t best = longest;
    int64_t best_time = time(best, even_time(best));
    const int32_t least = ceil_div(std::max(options_.min_chunk_tokens, 1), kTileTokens);
    for (int32_t chunk = longest; chunk > least;) {
        chunk = std::min(chunk - 1, ceil_div(chunk * 5, 6));
        if (chunk < least) break;
        const int64_t even = even_time(chunk);
        if (even >= best_time) continue;  // no schedule of these entries ends sooner
        const int64_t chunk_time = time(chunk, even);
        if (chunk_time < best_time) {
            best = chunk;
            best_time = chunk_time;
        }
    }
    return best;
}

// The work divided evenly.
int64_t AttentionPlanner::even_time(int32_t chunk_tiles) const {
    int64_t work = 0;
    for (const Load& load : loads_) {
        const int32_t count = cut(load.tiles, chunk_tiles).count;
        work += load.copies *
                (static_cast<int64_t>(load.tiles) * kTileTokens + static_cast<int64_t>(count) * load.cost);
    }
    return (work + options_.num_workers - 1) / options_.num_workers;
}

void AttentionPlanner::sort_entries(int32_t chunk_tiles) {
    entries_by_time_.clear();
    const auto add = [&](int32_t tiles, int32_t cost, int64_t copies) {
        const int64_t time = int64_t{tiles} * kTileTokens + cost;
        const auto units = static_cast<size_t>((time + time_unit_ - 1) / time_unit_);
        if (units >= entries_by_time_.size()) entries_by_time_.resize(units + 1);
        entries_by_time_[units] += copies;
    };
    for (const Load& load : loads_) {
        const auto [count, tiles] = cut(load.tiles, chunk_tiles);
        if (count > 1) add(tiles, load.cost, load.copies * (count - 1));
        add(load.tiles - (count - 1) * tiles, load.cost, load.copies);
    }
}

// When the last worker would finish, in tokens, if workers took the entries longest first: levels of equally
// loaded workers, filled from the lowest.
int64_t AttentionPlanner::makespan(int32_t chunk_tiles) {
    sort_entries(chunk_tiles);
    const auto lowest_first = std::greater<>();
    workers_.assign(1, {0, options_.num_workers});
    int64_t latest = 0;
    for (size_t units = entries_by_time_.size(); units-- > 0;) {
        for (int64_t left = entries_by_time_[units]; left > 0;) {
            std::pop_heap(workers_.begin(), workers_.end(), lowest_first);
            const auto [load, count] = workers_.back();
            workers_.pop_back();
            // Alone at their level, they take whole rounds at once.
            const int64_t rounds = workers_.empty() ? std::max<int64_t>(1, left / count) : 1;
            const int64_t taken = std::min(left, count);
            const int64_t after = load + rounds * static_cast<int64_t>(units) * time_unit_;
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
    is_sharing_.assign(static_cast<size_t>(segments_.num_requests()), 0);
    num_sharing_ = 0;
    next_part_.assign(plan_.part_begin.begin(), plan_.part_begin.end() - 1);
    const int32_t tile_members = options_.max_rows / options_.group_size;
    for (const Place& place : sorted_) {
        const AttentionSegment& s = segments_.segments()[static_cast<size_t>(place.segment)];
        for (int32_t tile = 0; tile < s.count; tile += tile_members) {
            emit_tile(s, tile, std::min(tile_members, s.count - tile));
        }
    }
}

// Those with most members first, since they may be loaded before the kernel ahead has ended; then longest
// first, so that the last entries to start are short; the order of the segments breaks ties.
void AttentionPlanner::order_segments() {
    sorted_.clear();
    int32_t index = 0;
    for (const AttentionSegment& s : segments_.segments()) {
        sorted_.push_back({int64_t{s.count} << 32 | (s.end - s.begin), index++});
    }
    std::sort(sorted_.begin(), sorted_.end(), [](const Place& a, const Place& b) {
        return a.key != b.key ? a.key > b.key : a.segment < b.segment;
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
    const auto num_words = static_cast<size_t>(num_entries) * static_cast<size_t>(count) * 2;
    auto first_member = static_cast<int32_t>(plan_.members.size() / 2);
    for (int32_t i = 0; count > 1 && i < count; ++i) {
        uint8_t& is_sharing = is_sharing_[static_cast<size_t>(members[i])];
        num_sharing_ += 1 - is_sharing;
        is_sharing = 1;
    }
    plan_.members.resize(plan_.members.size() + num_words);
    int32_t* out = plan_.members.data() + plan_.members.size() - num_words;
    for (int32_t k = 0; k < num_entries; ++k, first_member += count) {
        const int32_t begin = s.begin + k * tiles * kTileTokens;
        const int32_t end =
            s.end - begin <= int64_t{tiles} * kTileTokens ? s.end : begin + tiles * kTileTokens;
        plan_.entries.insert(plan_.entries.end(), {members[0], begin, end, first_member, count, 0, 0, 0});
        for (int32_t i = 0; i < count; ++i) {
            const auto request = static_cast<size_t>(members[i]);
            const bool whole = plan_.part_begin[request + 1] - plan_.part_begin[request] == 1;
            *out++ = members[i];
            *out++ = whole ? -1 : next_part_[request]++;
        }
        plan_.entries[plan_.entries.size() - 3] = out[1 - 2 * count];
    }
}

AttentionPlan plan_attention(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                             const AttentionPlanOptions& options) {
    AttentionPlanner planner;
    return planner.plan(block_tables, seq_lens, options);
}

}  // namespace parrot
