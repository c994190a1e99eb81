#include "kvcache/attention_segments.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "concat.h"
#include "mutants.h"

namespace parrot {
namespace {

constexpr size_t kSpareBlocks = 16;  // that rows may grow by before all of them are copied again

// The first index in [begin, end) at which two rows differ; end if they do not.
int32_t first_difference(const int32_t* one, const int32_t* other, int32_t begin, int32_t end) {
    // memcmp runs at memory speed; only the stretch that differs is looked at block by block.
    constexpr int32_t kStretch = 32;
    while (end - begin >= kStretch && std::memcmp(one + begin, other + begin, kStretch * sizeof(*one)) == 0) {
        begin += kStretch;
    }
    while (begin < end && one[begin] == other[begin]) ++begin;
    return begin;
}

}  // namespace

void AttentionSegments::update(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens,
                               int32_t block_size, int32_t min_shared_tokens, bool share) {
    const Settings settings{block_size, min_shared_tokens, share};
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

// The blocks of a request from index `first` on.
void AttentionSegments::check_blocks(int32_t request, int32_t first) const {
    const int32_t* blocks = row(request);
    const int32_t end = num_blocks(request);
    int32_t least = 0;
    for (int32_t b = first; b < end; ++b) least = std::min(least, blocks[b]);
    if (least >= 0) return;
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
        const auto num_known = static_cast<size_t>(ceil_blocks(before));
        if (mutant("blocks_not_compared")) continue;
        if (std::memcmp(row(static_cast<int32_t>(r)), &known_[r * known_stride_],
                        num_known * sizeof(int32_t)) != 0) {
            return false;
        }
    }
    return true;
}

void AttentionSegments::grow() {
    for (int32_t r = 0; r < num_requests_; ++r) {
        check_blocks(r, ceil_blocks(known_lens_[static_cast<size_t>(r)]));
    }
    for (size_t r = 0; r < lens_.size(); ++r) {
        if (own_segment_[r] >= 0) segments_[static_cast<size_t>(own_segment_[r])].end = lens_[r];
    }
    remember();
}

void AttentionSegments::search() {
    for (int32_t r = 0; r < num_requests_; ++r) check_blocks(r, 0);
    ++num_searches_;
    segments_.clear();
    own_segment_.assign(lens_.size(), -1);
    order_.resize(lens_.size());
    for (int32_t r = 0; r < num_requests_; ++r) order_[static_cast<size_t>(r)] = r;
    if (settings_.share) {
        find_shared();
    } else {
        for (int32_t r = 0; r < num_requests_; ++r) add_segment(0, lens_[static_cast<size_t>(r)], r, 1);
    }
    known_stride_ = 0;
    remember();
}

// Copies the blocks that are new; all of them where rows have become too short.
void AttentionSegments::remember() {
    int32_t widest = 0;
    for (int32_t r = 0; r < num_requests_; ++r) widest = std::max(widest, num_blocks(r));
    const bool anew = static_cast<size_t>(widest) > known_stride_;
    if (anew) {
        known_stride_ = static_cast<size_t>(widest) + kSpareBlocks;
        known_.resize(lens_.size() * known_stride_);
    }
    for (int32_t r = 0; r < num_requests_; ++r) {
        const int32_t first = anew ? 0 : ceil_blocks(known_lens_[static_cast<size_t>(r)]);
        std::copy(row(r) + first, row(r) + num_blocks(r), &known_[size_t(r) * known_stride_] + first);
    }
    known_lens_.assign(lens_.begin(), lens_.end());
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
        if (end - group.begin >= settings_.min_shared_tokens) {
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
        const bool full = lens_[static_cast<size_t>(members[i])] / settings_.block_size > group.index;
        const int32_t request = members[i];
        keyed_.push_back({full ? row(request)[group.index] : -1 - i, request});
    }
    const auto by_key = [](const Keyed& a, const Keyed& b) {
        return a.key != b.key ? a.key < b.key : a.request < b.request;
    };
    std::sort(keyed_.begin(), keyed_.end(), by_key);
    for (size_t i = 0; i < keyed_.size();) {  // a part is named by its first member
        const int32_t key = keyed_[i].key, leader = keyed_[i].request;
        for (; i < keyed_.size() && keyed_[i].key == key; ++i) keyed_[i].key = leader;
    }
    std::sort(keyed_.begin(), keyed_.end(), by_key);
    for (size_t i = 0; i < keyed_.size();) {
        const auto part = static_cast<int32_t>(i);
        const int32_t leader = keyed_[i].key;
        for (; i < keyed_.size() && keyed_[i].key == leader; ++i)
            members[static_cast<int32_t>(i)] = keyed_[i].request;
        const int32_t count = static_cast<int32_t>(i) - part;
        const bool has_more = lens_[static_cast<size_t>(leader)] > group.begin;
        if (has_more || count > 1) stack_.push_back({group.first + part, count, group.begin, group.index});
    }
}

void AttentionSegments::add_segment(int32_t begin, int32_t end, int32_t first, int32_t count) {
    if (end <= begin) return;
    // Later splits reorder order_ within a group, never across it, so that the slice keeps its members.
    if (count == 1) {
        own_segment_[static_cast<size_t>(order_[static_cast<size_t>(first)])] =
            static_cast<int32_t>(segments_.size());
    }
    segments_.push_back({begin, end, first, count});
}

}  // namespace parrot
