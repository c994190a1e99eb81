// The parameters of paged prefill, its items of work, and what the warps of a thread block hand each other;
// see paged_prefill.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/cursor.cuh"
#include "kernels/instructions.cuh"

namespace parrot::prefill {

constexpr int kBlockTokens = 16;             // KV slots in a cache block
constexpr int kGroupRows = 64;               // query rows of a warp group that computes
constexpr int kGroups = 2;                   // such warp groups
constexpr int kRows = kGroups * kGroupRows;  // query rows of a tile
constexpr int kTokens = 128;                 // of a tile of keys or values
constexpr int kPages = kTokens / kBlockTokens;
constexpr int kColumnBytes = 128 * 128;  // tiles lie in columns of 64 elements: 128 rows of 128 bytes
constexpr int kComputingWarps = 4 * kGroups;
constexpr int kPageLoaders = 2;  // warps that load keys, and as many for values
constexpr int kThreads = 128 * (kGroups + 1);
template <int kHeadDim>
constexpr int kStages = kHeadDim == 128 ? 3 : 6;  // of the rings of keys and of values: what fits
static_assert(kRows == kTokens);                  // they share kColumnBytes

struct Params {
    CUtensorMap query_map;  // [num_rows, num_heads * head_dim] in boxes of 128 x 64
    CUtensorMap key_map;    // [num_blocks * 16, num_kv_heads * head_dim] in boxes of 16 x 64
    CUtensorMap value_map;
    const void* value_cache;  // [num_blocks, 16, num_kv_heads, head_dim], half or bfloat16
    void* output;             // [num_rows, num_heads, head_dim]
    const int4* tiles;        // [num_tiles]: row of the tables, first row, end row, position of the first row
    const int32_t* block_tables;  // [.., max_blocks]
    uint32_t* next_work;          // [1], zero before and after: items claimed after the first ones
    int32_t num_tiles;
    int32_t max_blocks;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t section_heads;  // query heads whose items are done before those of the next ones
    float scale_log2;       // softmax scale times log2(e)
};

// The rows of a tile for one query head.
struct Item {
    int head;  // -1: no more work
    int table;
    int first_row;
    int num_rows;
    int position;  // of the first row: it sees the tokens up to this one

    __device__ int end() const { return position + num_rows; }
    __device__ int num_tiles() const { return (end() - 1) / kTokens + 1; }
};

__device__ inline int num_items(const Params& p) { return p.num_tiles * p.num_heads; }

// Item `work`, in the order in which they are claimed.
__device__ inline Item read_item(const Params& p, int work) {
    if (work >= num_items(p)) return {-1, 0, 0, 0, 0};
    const int section_items = p.num_tiles * p.section_heads;
    const int first_head = work / section_items * p.section_heads, rest = work % section_items;
    const int heads = min(p.section_heads, p.num_heads - first_head);
    const int4 tile = p.tiles[rest / heads];
    return {first_head + rest % heads, tile.x, tile.y, min(tile.z - tile.y, kRows), tile.w};
}

template <int kHeadDim>
constexpr int kTileBytes = kTokens * kHeadDim * 2;

// Shared memory: the query, then the stages of keys, then those of values.
template <int kHeadDim>
constexpr int shared_bytes() {
    return 1024 + (1 + 2 * kStages<kHeadDim>)*kTileBytes<kHeadDim>;
}

// Slots that one side fills and the other drains.
template <int kSlots>
struct Ring {
    uint64_t filled[kSlots];
    uint64_t drained[kSlots];

    __device__ void init(int fillers, int drainers) {
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(shared_address(&filled[s]), fillers);
            barrier_init(shared_address(&drained[s]), drainers);
        }
    }
    __device__ void wait_filled(const Cursor<kSlots>& at) const {
        barrier_wait(shared_address(&filled[at.slot]), at.parity);
    }
    // A slot that nobody has filled yet counts as drained.
    __device__ void wait_drained(const Cursor<kSlots>& at) const {
        barrier_wait(shared_address(&drained[at.slot]), at.parity ^ 1);
    }
    // This warp is done with a slot.
    __device__ void release(int slot) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) release_thread(slot);
    }
    // This thread is.
    __device__ void release_thread(int slot) const { barrier_arrive(shared_address(&drained[slot])); }
};

constexpr int kItems = 2;  // one under way, the next one

template <int kHeadDim>
struct Pipeline {
    Ring<1> query;
    Ring<kStages<kHeadDim>> keys;
    Ring<kStages<kHeadDim>> values;
    Ring<kItems>
        items;  // every lane arrives for what it wrote or read itself: racecheck follows no other order
    Item item[kItems];

    __device__ void init() {
        query.init(1, kComputingWarps);
        keys.init(kPageLoaders, kComputingWarps);
        values.init(kPageLoaders, kComputingWarps);
        items.init(32, 32 * (kComputingWarps + 2 * kPageLoaders));
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
    }
};

}  // namespace parrot::prefill
