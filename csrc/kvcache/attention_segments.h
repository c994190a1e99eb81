// Who shares what in a batch: the token ranges of a decode step and the requests that attend to each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace parrot {

// A range of tokens and the requests that attend to it.
struct AttentionSegment {
    int32_t begin, end;
    int32_t first, count;  // slice of AttentionSegments::order()
};

// When several requests read a run of tokens together: where that takes less of the workers' time, counted in
// tokens, than each of them reading it as a part of its own tokens.
struct AttentionSharing {
    bool enabled = true;
    int32_t min_tokens = 1;     // a shorter run never
    int32_t tile_members = 1;   // requests of an entry at most
    int32_t entry_tokens = 0;   // the start of an entry
    int32_t member_tokens = 0;  // the result of a request, written and read again

    bool operator==(const AttentionSharing&) const = default;
    bool pays(int32_t tokens, int32_t count) const {
        const int64_t entries = (int64_t{count} + tile_members - 1) / tile_members;
        const int64_t together = entries * (int64_t{tokens} + entry_tokens) + int64_t{count} * member_tokens;
        return tokens >= min_tokens && int64_t{count} * tokens > together;
    }
};

// Keeps the segments of the last step: see AttentionPlanner.
class AttentionSegments {
  public:
    // Throws std::invalid_argument for lengths and blocks as AttentionPlanner::plan does.
    void update(std::span<const int32_t> block_tables, std::span<const int32_t> seq_lens, int32_t block_size,
                const AttentionSharing& sharing);

    const std::vector<AttentionSegment>& segments() const { return segments_; }
    const std::vector<int32_t>& order() const { return order_; }  // requests, each once
    int32_t num_requests() const { return num_requests_; }
    int64_t num_searches() const { return num_searches_; }
    int32_t max_block() const { return max_block_; }  // the largest id that a request reads; -1: none

  private:
    // Requests (a slice of order_) whose blocks agree before `index`; tokens from `begin` on are in no
    // segment yet.
    struct Group {
        int32_t first, count, begin, index;
    };
    struct Settings {
        int32_t block_size = 0;
        AttentionSharing sharing;
        bool operator==(const Settings&) const = default;
    };

    // Members with one next block, named by the first of them.
    struct Run {
        int32_t leader, first, count;
    };

    int32_t ceil_blocks(int32_t length) const {
        return length / settings_.block_size + (length % settings_.block_size != 0 ? 1 : 0);
    }
    int32_t num_blocks(int32_t request) const { return ceil_blocks(lens_[static_cast<size_t>(request)]); }
    const int32_t* row(int32_t request) const { return &tables_[size_t(request) * max_blocks_]; }
    int32_t first_block(const AttentionSegment& segment) const {
        return segment.begin / settings_.block_size;
    }
    // Blocks of a segment, whose end is that of the last step until grow() has moved it.
    int32_t count_blocks(const AttentionSegment& segment) const {
        return ceil_blocks(segment.end) - first_block(segment);
    }
    void check_lengths() const;
    int32_t check_blocks(int32_t request, int32_t first, int32_t end) const;
    bool only_grew() const;
    void grow();
    void search();
    void find_shared();
    int32_t common_blocks(const Group& group) const;
    void split(const Group& group);
    void add_segment(int32_t begin, int32_t end, int32_t first, int32_t count);
    void remember();

    std::span<const int32_t> tables_;  // of this step
    std::span<const int32_t> lens_;
    int32_t num_requests_ = 0;
    size_t max_blocks_ = 0;
    Settings settings_;

    std::vector<AttentionSegment> segments_;
    std::vector<int32_t> order_;
    std::vector<int32_t> own_segment_;  // [num_requests], -1: none
    std::vector<Group> stack_;
    std::vector<int64_t> keyed_;  // scratch of split: next block << 32 | request
    std::vector<Run> runs_;       // scratch of split
    std::vector<int32_t> known_;  // the blocks that each segment had in the last step, once for all members
    std::vector<size_t> known_begin_;  // [num_segments + 1]: where in known_; own segments have room to grow
    std::vector<int32_t> known_lens_;  // empty: nothing is known
    int64_t num_searches_ = 0;
    int32_t max_block_ = -1;
};

}  // namespace parrot
