#include "kvcache/attention_segments.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "concat.h"
#include "mutants.h"

namespace parrot {
namespace {

constexpr size_t kSpareBlocks = 16;  // that a request may grow by before all of them are copied again

// The first index in [begin, end) at which two rows differ; end if they do not.
int32_t first_difference(const int32_t* one, const int32_t* other, int32_t begin, int32_t end) {
    // memcmp runs at memory speed, and most rows agree to the end; where they do not, only the stretch that
    // differs is looked at block by block.
    if (std::memcmp(one + begin, other + begin, size_t(end - begin) * sizeof(*one)) == 0) return end;
    constexpr int32_t kStretch = 32;
    while (end - begin >= kStretch && std::memcmp(one + begin, other + begin, kStretch * sizeof(*one)) == 0) {
        begin += kStretch;
    }
    while (begin < end && one[begin] == other[begin]) ++begin;
    return begin;
}

}  // namespace

void AttentionSegments::update(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                               int32_t block_size, const AttentionSharing& sharing) {
    const Settings settings{block_size, sharing};
    if (settings != settings_ || seq_lens.size() != known_lens_.size()) known_lens_.clear();
    tables_ = block_tables;
    lens_ = seq_lens;
    num_requests_ = static_cast<int32_t>(seq_lens.size());
    max_blocks_ = seq_lens.empty() ? 0 : block_tables.size() / seq_lens.size();
    settings_ = settings;
    check_lengths();
    if (!known_lens_.empty() && only_grew()) {
        grow();
    } else {
        known_lens_.clear();  // stays so if a block is refused
        search();
    }
}

void AttentionSegments::check_lengths() const {
    const int64_t room = static_cast<int64_t>(max_blocks_) * settings_.block_size;
    for (size_t r = 0; r < lens_.size(); ++r) {
        if (lens_[r] < 1 || lens_[r] > room) {
            throw std::invalid_argument(
                concat("seq_lens[", r, "] = ", lens_[r], " is outside [1, ", room, "]"));
        }
    }
}

// Checks the blocks [first, end) of a request; returns the largest.
int32_t AttentionSegments::check_blocks(int32_t request, int32_t first, int32_t end) const {
    const int32_t* blocks = row(request);
    int32_t least = 0, most = -1;
    for (int32_t b = first; b < end; ++b) {
        least = std::min(least, blocks[b]);
        most = std::max(most, blocks[b]);
    }
    if (least >= 0) return most;
    const auto b =
        std::find_if(blocks + first, blocks + end, [](int32_t block) { return block < 0; }) - blocks;
    throw std::invalid_argument(
        concat("block_tables[", request, ", ", b, "] = ", blocks[b], " within seq_lens"));
}

// Every request has the blocks that it had, and perhaps more, and tokens of its own that can grow.
bool AttentionSegments::only_grew() const {
    for (size_t r = 0; r < lens_.size(); ++r) {
        const int32_t before = known_lens_[r];
        if (lens_[r] < before || (lens_[r] > before && own_segment_[r] < 0)) return false;
    }
    if (mutant("blocks_not_compared")) return true;
    for (size_t i = 0; i < segments_.size(); ++i) {
        const AttentionSegment& s = segments_[i];
        const size_t bytes = static_cast<size_t>(count_blocks(s)) * sizeof(int32_t);
        for (int32_t m = 0; m < s.count; ++m) {
            const int32_t* blocks = row(order_[static_cast<size_t>(s.first + m)]) + first_block(s);
            if (std::memcmp(blocks, &known_[known_begin_[i]], bytes) != 0) return false;
        }
    }
    return true;
}

void AttentionSegments::grow() {
    int32_t most = max_block_;
    for (int32_t r = 0; r < num_requests_; ++r) {
        const int32_t num_known = ceil_blocks(known_lens_[static_cast<size_t>(r)]);
        most = std::max(most, check_blocks(r, num_known, num_blocks(r)));
    }
    max_block_ = most;
    bool has_room = true;
    for (size_t r = 0; r < lens_.size(); ++r) {
        if (own_segment_[r] < 0) continue;
        const auto index = static_cast<size_t>(own_segment_[r]);
        AttentionSegment& own = segments_[index];
        const auto num_known = static_cast<size_t>(count_blocks(own));
        own.end = lens_[r];
        const auto count = static_cast<size_t>(count_blocks(own));
        has_room = has_room && count <= known_begin_[index + 1] - known_begin_[index];
        if (!has_room || count == num_known) continue;
        const int32_t* blocks = row(static_cast<int32_t>(r)) + first_block(own);
        std::copy(blocks + num_known, blocks + count, &known_[known_begin_[index] + num_known]);
    }
    known_lens_.assign(lens_.begin(), lens_.end());
    if (!has_room) remember();
}

// A segment's blocks are checked as it is found, once for all members, since they have been seen to agree.
void AttentionSegments::search() {
    ++num_searches_;
    max_block_ = -1;
    segments_.clear();
    own_segment_.assign(lens_.size(), -1);
    order_.resize(lens_.size());
    for (int32_t r = 0; r < num_requests_; ++r) order_[static_cast<size_t>(r)] = r;
    if (settings_.sharing.enabled) {
        find_shared();
    } else {
        for (int32_t r = 0; r < num_requests_; ++r) add_segment(0, lens_[static_cast<size_t>(r)], r, 1);
    }
    known_lens_.assign(lens_.begin(), lens_.end());
    remember();
}

// Copies the blocks of all segments.
void AttentionSegments::remember() {
    known_.clear();
    known_begin_.clear();
    for (const AttentionSegment& s : segments_) {
        known_begin_.push_back(known_.size());
        const int32_t* blocks = row(order_[static_cast<size_t>(s.first)]) + first_block(s);
        known_.insert(known_.end(), blocks, blocks + count_blocks(s));
        if (s.count == 1) known_.resize(known_.size() + kSpareBlocks);
    }
    known_begin_.push_back(known_.size());
}

void AttentionSegments::find_shared() {
    if (num_requests_ == 0) return;
    stack_.assign(1, {0, num_requests_, 0, 0});
    while (!stack_.empty()) {
        Group group = stack_.back();
        stack_.pop_back();
        if (group.count == 1) {
            const int32_t request = order_[static_cast<size_t>(group.first)];
            add_segment(group.begin, lens_[static_cast<size_t>(request)], group.first, 1);
            continue;
        }
        group.index = common_blocks(group);
        const int32_t end = group.index * settings_.block_size;
        if (settings_.sharing.pays(end - group.begin, group.count)) {
            add_segment(group.begin, end, group.first, group.count);
            group.begin = end;
        }
        split(group);
    }
}

// First block index at which the group's members differ, or at which one of them has no full block.
int32_t AttentionSegments::common_blocks(const Group& group) const {
    const int32_t* members = &order_[static_cast<size_t>(group.first)];
    int32_t limit = std::numeric_limits<int32_t>::max();
    for (int32_t i = 0; i < group.count; ++i) {
        limit = std::min(limit, lens_[static_cast<size_t>(members[i])] / settings_.block_size);
    }
    for (int32_t i = 1; i < group.count && limit > group.index; ++i) {
        limit = first_difference(row(members[0]), row(members[i]), group.index, limit);
    }
    return std::max(limit, group.index);
}

// Parts a group by its next block. Members without another full block, or with no token left, stand alone.
// Parts and members keep the order of the requests, whatever the ids of their blocks: a request that fills
// another block changes nobody's place.
void AttentionSegments::split(const Group& group) {
    const auto members = order_.begin() + group.first;
    keyed_.clear();
    for (int32_t i = 0; i < group.count; ++i) {
        const int32_t request = members[i];
        const bool full = lens_[static_cast<size_t>(request)] / settings_.block_size > group.index;
        const int32_t key = full ? row(request)[group.index] : -1 - i;
        if (full && key < 0) check_blocks(request, group.index, group.index + 1);
        keyed_.push_back(int64_t{key} << 32 | request);
    }
    std::sort(keyed_.begin(), keyed_.end());
    runs_.clear();
    for (size_t i = 0; i < keyed_.size(); ++i) {
        const auto request = static_cast<int32_t>(keyed_[i]);
        if (i == 0 || keyed_[i] >> 32 != keyed_[i - 1] >> 32) {
            runs_.push_back({request, static_cast<int32_t>(i), 0});
        }
        ++runs_.back().count;
    }
    std::sort(runs_.begin(), runs_.end(), [](const Run& a, const Run& b) { return a.leader < b.leader; });
    int32_t part = 0;
    for (const Run& run : runs_) {
        for (int32_t i = 0; i < run.count; ++i) {
            members[part + i] = static_cast<int32_t>(keyed_[static_cast<size_t>(run.first + i)]);
        }
        const bool has_more = lens_[static_cast<size_t>(run.leader)] > group.begin;
        if (has_more || run.count > 1) {
            stack_.push_back({group.first + part, run.count, group.begin, group.index});
        }
        part += run.count;
    }
}

void AttentionSegments::add_segment(int32_t begin, int32_t end, int32_t first, int32_t count) {
    if (end <= begin) return;
    const int32_t request = order_[static_cast<size_t>(first)];
    max_block_ = std::max(max_block_, check_blocks(request, begin / settings_.block_size, ceil_blocks(end)));
    // Later splits reorder order_ within a group, never across it, so that the slice keeps its members.
    if (count == 1) own_segment_[static_cast<size_t>(request)] = static_cast<int32_t>(segments_.size());
    segments_.push_back({begin, end, first, count});
}

}  // namespace parrot
