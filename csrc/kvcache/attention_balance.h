// How long the entries of a plan are, so that all workers are done soonest.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace parrot {

constexpr int32_t kTileTokens = 64;  // the kernel's pipeline stage: ranges are cut at multiples of it

// Segments are cut into even entries, at most so long: in tiles, for what several requests share and for what
// a request has of its own.
struct AttentionChunks {
    int32_t shared = 1, own = 1;
};

// Chooses them: of all pairs of lengths the one with which workers that take the longest entries first end
// soonest, a request's own entries, which come last, being taken to end later than they should.
class AttentionBalance {
  public:
    // How a segment is cut: `count` entries of `tiles` each, the last one of what is left.
    struct Cut {
        int32_t count, tiles;
    };
    static Cut cut(int32_t tiles, int32_t chunk_tiles);

    void clear();
    // A segment of so many tiles, which `copies` workers are to read; `cost`: of each of its entries besides
    // the tiles, in tokens' worth of a worker's time.
    void add(bool is_shared, int32_t tiles, int32_t cost, int64_t copies);
    // Entries are not cut below `least_tiles`. Deterministic. Throws std::invalid_argument for more work than
    // 64 bits can count.
    AttentionChunks choose(int32_t num_workers, int32_t least_tiles);

  private:
    // Only the length and the cost matter to the balance, and many segments have the same.
    struct Load {
        int32_t tiles, cost;
        int64_t copies;
    };
    // A length that entries of one kind may have: how many there are, the work of all of them and the time
    // of the longest.
    struct Length {
        int32_t chunk_tiles;
        int64_t entries, work, longest;
    };
    // Shared segments, or those of single requests.
    struct Kind {
        std::vector<Load> loads;
        std::vector<Length> lengths;
    };
    struct Pair {
        int64_t bound;  // no schedule ends sooner, `late` included
        int64_t late;   // what its last entries may be late
        AttentionChunks chunks;
    };

    static void merge_equal(std::vector<Load>& loads);
    static void list_lengths(Kind& kind, int32_t least_tiles, int32_t percent);
    void require_sums(int32_t least_tiles) const;
    void list_pairs(int32_t num_workers);
    void choose_unit();
    void count_entries(const Kind& kind, int32_t chunk_tiles);
    int64_t makespan(AttentionChunks chunks, int32_t num_workers);
    int64_t fill_lowest(int64_t time, int64_t copies);
    int64_t fill_levels(int64_t time, int64_t copies);

    Kind shared_, own_;
    std::vector<Pair> pairs_;
    int64_t time_unit_ = 1;                             // the makespan counts in it, in tokens
    std::vector<int64_t> entries_by_time_;              // how many take each number of units
    std::vector<std::pair<int64_t, int64_t>> workers_;  // (load, how many workers have it), a heap
};

}  // namespace parrot
