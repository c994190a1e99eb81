#include "kvcache/attention_balance.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace parrot {
namespace {

constexpr int64_t kMaxUnits = 4096;  // of the longest entry's time, in which a makespan is counted
constexpr int64_t kLeastUnit = 16;   // tokens
// The next shorter length, in percent of the one before.
constexpr int32_t kSharedStep = 84, kOwnStep = 67;
// Of the time of a request's longest entry, in percent: how much later than it should the last one ends,
// since workers do not keep one pace beside shared entries. Where all entries start at once none is late.
constexpr int32_t kLatePercent = 40;
constexpr double kMostTime = 0x1p61;  // of all entries together, in tokens, so that sums of int64 hold

int32_t ceil_div(int32_t value, int32_t divisor) { return value / divisor + (value % divisor != 0); }

int64_t entry_time(int32_t tiles, int32_t cost) { return int64_t{tiles} * kTileTokens + cost; }

}  // namespace

// Rounding entries up to tiles may make fewer do.
AttentionBalance::Cut AttentionBalance::cut(int32_t tiles, int32_t chunk_tiles) {
    const int32_t each = ceil_div(tiles, ceil_div(tiles, chunk_tiles));
    return {ceil_div(tiles, each), each};
}

void AttentionBalance::clear() {
    shared_.loads.clear();
    own_.loads.clear();
}

void AttentionBalance::add(bool is_shared, int32_t tiles, int32_t cost, int64_t copies) {
    (is_shared ? shared_ : own_).loads.push_back({tiles, cost, copies});
}

AttentionChunks AttentionBalance::choose(int32_t num_workers, int32_t least_tiles) {
    merge_equal(shared_.loads);
    merge_equal(own_.loads);
    require_sums(least_tiles);
    list_lengths(shared_, least_tiles, kSharedStep);
    list_lengths(own_, least_tiles, kOwnStep);
    choose_unit();
    list_pairs(num_workers);
    AttentionChunks best = pairs_.front().chunks;
    int64_t best_time = pairs_.front().late + makespan(best, num_workers);
    for (const Pair& pair : pairs_) {
        if (pair.bound >= best_time) break;
        const int64_t time = pair.late + makespan(pair.chunks, num_workers);
        if (time < best_time) {
            best = pair.chunks;
            best_time = time;
        }
    }
    return best;
}

void AttentionBalance::merge_equal(std::vector<Load>& loads) {
    std::sort(loads.begin(), loads.end(), [](const Load& a, const Load& b) {
        return a.tiles != b.tiles ? a.tiles > b.tiles : a.cost > b.cost;
    });
    size_t num_kept = 0;
    for (const Load& load : loads) {
        Load* last = num_kept > 0 ? &loads[num_kept - 1] : nullptr;
        if (last != nullptr && last->tiles == load.tiles && last->cost == load.cost) {
            last->copies += load.copies;
        } else {
            loads[num_kept++] = load;
        }
    }
    loads.resize(num_kept);
}

void AttentionBalance::require_sums(int32_t least_tiles) const {
    double time = 0, entries = 0, longest = 0;
    for (const Kind* kind : {&shared_, &own_}) {
        for (const Load& load : kind->loads) {
            const double most = ceil_div(load.tiles, least_tiles), copies = static_cast<double>(load.copies);
            entries += copies * most;
            time += copies * (static_cast<double>(entry_time(load.tiles, 0)) + most * load.cost);
            longest = std::max(longest, static_cast<double>(entry_time(load.tiles, load.cost)));
        }
    }
    // Each may be rounded up to the unit of the makespan.
    if (time + entries * (longest / kMaxUnits + kLeastUnit) > kMostTime) {
        throw std::invalid_argument(
            "the lengths of all requests times num_kv_heads are more than a plan can balance");
    }
}

void AttentionBalance::list_lengths(Kind& kind, int32_t least_tiles, int32_t percent) {
    kind.lengths.clear();
    int32_t chunk = kind.loads.empty() ? 1 : kind.loads.front().tiles;
    do {
        Length length{chunk, 0, 0, 0};
        for (const Load& load : kind.loads) {
            const auto [count, tiles] = cut(load.tiles, chunk);
            length.entries += load.copies * count;
            length.work += load.copies * (entry_time(load.tiles, 0) + int64_t{count} * load.cost);
            length.longest = std::max(length.longest, entry_time(tiles, load.cost));
        }
        kind.lengths.push_back(length);
        chunk = std::min(chunk - 1, static_cast<int32_t>((int64_t{chunk} * percent + 99) / 100));
    } while (chunk >= least_tiles);
}

// Longer entries first where bounds are equal: they write fewer parts.
void AttentionBalance::list_pairs(int32_t num_workers) {
    pairs_.clear();
    for (const Length& shared : shared_.lengths) {
        for (const Length& own : own_.lengths) {
            const int64_t even = (shared.work + own.work + num_workers - 1) / num_workers;
            const bool is_late = shared.entries > 0 && shared.entries + own.entries > num_workers;
            const int64_t late = is_late ? own.longest * kLatePercent / 100 : 0;
            pairs_.push_back({std::max({even, shared.longest, own.longest}) + late,
                              late,
                              {shared.chunk_tiles, own.chunk_tiles}});
        }
    }
    std::sort(pairs_.begin(), pairs_.end(), [](const Pair& a, const Pair& b) {
        if (a.bound != b.bound) return a.bound < b.bound;
        return a.chunks.shared != b.chunks.shared ? a.chunks.shared > b.chunks.shared
                                                  : a.chunks.own > b.chunks.own;
    });
}

void AttentionBalance::choose_unit() {
    const int64_t longest = std::max(shared_.lengths.front().longest, own_.lengths.front().longest);
    time_unit_ = kLeastUnit * (longest / (kLeastUnit * kMaxUnits) + 1);
}

void AttentionBalance::count_entries(const Kind& kind, int32_t chunk_tiles) {
    const auto add = [&](int64_t time, int64_t copies) {
        const auto units = static_cast<size_t>((time + time_unit_ - 1) / time_unit_);
        if (units >= entries_by_time_.size()) entries_by_time_.resize(units + 1);
        entries_by_time_[units] += copies;
    };
    for (const Load& load : kind.loads) {
        const auto [count, tiles] = cut(load.tiles, chunk_tiles);
        if (count > 1) add(entry_time(tiles, load.cost), load.copies * (count - 1));
        add(entry_time(load.tiles - (count - 1) * tiles, load.cost), load.copies);
    }
}

// When the last worker would finish, in tokens: levels of equally loaded workers, filled from the lowest.
int64_t AttentionBalance::makespan(AttentionChunks chunks, int32_t num_workers) {
    entries_by_time_.clear();
    count_entries(shared_, chunks.shared);
    count_entries(own_, chunks.own);
    workers_.assign(1, {0, num_workers});
    int64_t latest = 0;
    for (size_t units = entries_by_time_.size(); units-- > 0;) {
        const int64_t time = static_cast<int64_t>(units) * time_unit_;
        int64_t left = entries_by_time_[units];
        if (time == 0 || left == 0) continue;
        if (left >= num_workers) left = fill_levels(time, left);
        latest = std::max(latest, fill_lowest(time, left));
    }
    for (const auto& [load, count] : workers_) latest = std::max(latest, load);
    return latest;
}

// Entries of one length, one by one: each goes to the worker that is free first. When the last one ends.
int64_t AttentionBalance::fill_lowest(int64_t time, int64_t copies) {
    const auto lowest_first = std::greater<>();
    int64_t latest = 0;
    while (copies > 0) {
        std::pop_heap(workers_.begin(), workers_.end(), lowest_first);
        const auto [load, count] = workers_.back();
        workers_.pop_back();
        const int64_t taken = std::min(copies, count);
        latest = load + time;
        workers_.push_back({latest, taken});
        std::push_heap(workers_.begin(), workers_.end(), lowest_first);
        if (taken < count) {
            workers_.push_back({load, count - taken});
            std::push_heap(workers_.begin(), workers_.end(), lowest_first);
        }
        copies -= taken;
    }
    return latest;
}

// The same for most of many entries at once; how many are left. They start at the smallest of the times
// load + k * time of all workers, so those that start before some moment are counted without placing them.
int64_t AttentionBalance::fill_levels(int64_t time, int64_t copies) {
    const auto started = [&](int64_t load, int64_t moment) {
        return moment > load ? (moment - load + time - 1) / time : 0;
    };
    const int64_t lowest = workers_.front().first;  // loads differ by multiples of the unit
    int64_t total = copies * time, num_workers = 0;
    for (const auto& [load, count] : workers_) {
        total += load * count;
        num_workers += count;
    }
    int64_t begin = 0,
            end = (total / num_workers - lowest) / time_unit_ + 2;  // units; more have started by it
    int64_t num_started = 0;
    while (end - begin > 1) {
        const int64_t middle = begin + (end - begin) / 2;
        int64_t num = 0;
        for (const auto& [load, count] : workers_) {
            num += count * started(load, lowest + middle * time_unit_);
        }
        if (num <= copies) {
            begin = middle;
            num_started = num;
        } else {
            end = middle;
        }
    }
    const int64_t moment = lowest + begin * time_unit_;
    for (auto& [load, count] : workers_) load += started(load, moment) * time;
    std::make_heap(workers_.begin(), workers_.end(), std::greater<>());
    return copies - num_started;
}

}  // namespace parrot
