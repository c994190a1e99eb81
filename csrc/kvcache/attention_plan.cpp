#include "kvcache/attention_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>

#include "concat.h"

namespace parrot {
namespace {

constexpr int32_t kMaxCost = 1 << 20;  // tokens; what an entry is taken to cost at most, so that sums hold

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
    if (options.entry_tokens < 0 || options.own_entry_tokens < 0 || options.row_tokens < 0) {
        throw std::invalid_argument(concat("plan_attention: entry_tokens = ", options.entry_tokens,
                                           ", own_entry_tokens = ", options.own_entry_tokens,
                                           " and row_tokens = ", options.row_tokens,
                                           " must not be negative"));
    }
}

void require_room(const char* name, int64_t room, int64_t needed, int64_t size) {
    if (room < needed) {
        throw std::invalid_argument(
            concat(name, " has room for ", room * size, " int32, the plan needs ", needed * size));
    }
}

}  // namespace

const AttentionPlan& AttentionPlanner::plan(std::span<const int32_t> block_tables,
                                            std::span<const int32_t> seq_lens,
                                            const AttentionPlanOptions& options) {
    check(options);
    options_ = options;
    segments_.update(block_tables, seq_lens, options.block_size, sharing());
    choose_chunks();
    check_room();
    emit();
    return plan_;
}

AttentionSharing AttentionPlanner::sharing() const {
    const int64_t row_tokens = int64_t{options_.row_tokens} * options_.group_size;
    return {.enabled = options_.share,
            .min_tokens = options_.min_shared_tokens,
            .tile_members = options_.max_rows / options_.group_size,
            .entry_tokens = std::min(options_.entry_tokens, kMaxCost),
            .member_tokens = static_cast<int32_t>(std::min<int64_t>(row_tokens, kMaxCost))};
}

int32_t AttentionPlanner::entry_cost(bool is_shared, int32_t members) const {
    const int64_t rows = static_cast<int64_t>(members) * options_.group_size;
    const int64_t most = kMaxCost;
    if (options_.row_tokens > 0 && rows > most) return kMaxCost;
    const int32_t start = is_shared ? options_.entry_tokens : options_.own_entry_tokens;
    return static_cast<int32_t>(std::min(most, start + rows * options_.row_tokens));
}

AttentionBalance::Cut AttentionPlanner::cut(const AttentionSegment& segment) const {
    return AttentionBalance::cut(num_tiles(segment.end - segment.begin),
                                 segment.count > 1 ? chunks_.shared : chunks_.own);
}

void AttentionPlanner::choose_chunks() {
    balance_.clear();
    const int32_t tile_members = options_.max_rows / options_.group_size;
    for (const AttentionSegment& s : segments_.segments()) {
        const int32_t tiles = num_tiles(s.end - s.begin), whole = s.count / tile_members;
        const int32_t rest = s.count - whole * tile_members;
        const bool is_shared = s.count > 1;
        const auto add = [&](int32_t members, int64_t copies) {
            balance_.add(is_shared, tiles, entry_cost(is_shared, members), copies * options_.num_kv_heads);
        };
        if (whole > 0) add(tile_members, whole);
        if (rest > 0) add(rest, 1);
    }
    chunks_ = balance_.choose(options_.num_workers, num_tiles(std::max(options_.min_chunk_tokens, 1)));
}

void AttentionPlanner::check_room() const {
    const int32_t tile_members = options_.max_rows / options_.group_size;
    int64_t num_entries = 0, num_members = 0;
    for (const AttentionSegment& s : segments_.segments()) {
        const int64_t count = cut(s).count;
        num_entries += count * ceil_div(s.count, tile_members);
        num_members += count * s.count;
    }
    require_room("entries", options_.max_entries, num_entries, 8);
    require_room("members", options_.max_members, num_members, 2);
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
