// The loading side of SharedPrefixAttention: what the warps of a thread block hand each other, and the warps
// that load; see shared_prefix_attention.cuh.
#pragma once

#include <cstdint>

#include "kernels/cursor.cuh"
#include "kernels/instructions.cuh"
#include "kernels/row_tile.cuh"
#include "kernels/shared_prefix_work.cuh"

namespace parrot {

// Reads the keys or values of one page into its rows of a slot; one warp. `filled` is completed when all
// pages of the tile are there. A page that the item does not have is only counted.
template <typename T, int kHeadDim>
__device__ inline void load_page(const SharedPrefixAttentionParams& p, int kv_head, int page_id,
                                 bool is_there, bool is_value, uint32_t rows, uint32_t filled) {
    const int lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    if (lane != 0) return;
    barrier_expect(filled, is_there ? kBlockTokens * kHeadDim * 2 : 0);
    if (!is_there) return;
#pragma unroll
    for (int half = 0; half < kHeadDim / 64; ++half) {
        copy_box(rows + half * kHalfBytes, is_value ? p.value_map : p.key_map, filled,
                 kv_head * kHeadDim + half * 64, page_id * kBlockTokens);
    }
#else
    constexpr int kChunks = kHeadDim / 8;
    const size_t token_stride = size_t(p.num_kv_heads) * kHeadDim;
    const int chunk = lane % kChunks;
    const T* cache = static_cast<const T*>(is_value ? p.value_cache : p.key_cache);
    const T* column =
        cache + (size_t(page_id) * kBlockTokens * p.num_kv_heads + kv_head) * kHeadDim + chunk * 8;
    for (int row = lane / kChunks; is_there && row < kBlockTokens; row += 32 / kChunks) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(
                         rows + RowTile<T, kHeadDim>::tile_offset(row, chunk)),
                     "l"(column + row * token_stride)
                     : "memory");
    }
    __threadfence_block();
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(filled) : "memory");
#endif
}

// Until here this kernel ran beside the one before it; the one after it may now be made ready.
__device__ inline void wait_for_kernel_ahead() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <int kHeadDim, int kStages>
constexpr int shared_bytes() {
    return 1024 + kStages * 2 * kTileTokens * kHeadDim * 2;
}

// What the loading warps hand to the computing warps: items, and slots with their tiles' keys and values in
// the order in which they are needed: the keys of a tile before the values of the tile before it.
template <int kStages>
struct Pipeline {
    static constexpr int kSlots = 2 * kStages;
    static constexpr int kItems = 3;  // one under way, the next one, one being written
    uint64_t filled[kSlots];          // completed when a slot's half tile has arrived
    uint64_t drained[kSlots];         // completed when all computing warps are done with it
    // At these, unlike at those of the slots, every lane arrives for what it wrote or read itself: nothing
    // rests on an order between the lanes of a warp, which racecheck does not follow (docs/attention.md).
    uint64_t item_filled[kItems];   // completed by the leading loader
    uint64_t item_drained[kItems];  // completed when all warps, the loading ones too, are done with it
    ItemSlot items[kItems];

    __device__ void init() {
#if __CUDA_ARCH__ >= 900
        constexpr int kLoadArrivals = kLoaders;
#else
        constexpr int kLoadArrivals = 32 * kLoaders;
#endif
        for (int s = 0; s < kSlots; ++s) {
            barrier_init(shared_address(&filled[s]), kLoadArrivals);
            barrier_init(shared_address(&drained[s]), kWarps);
        }
        for (int i = 0; i < kItems; ++i) {
            barrier_init(shared_address(&item_filled[i]), 32);
            barrier_init(shared_address(&item_drained[i]), kBlockThreads);
        }
#if __CUDA_ARCH__ >= 900
        asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
#endif
    }
    __device__ void wait_filled(int slot, uint32_t parity) const {
        barrier_wait(shared_address(&filled[slot]), parity);
    }
    // This warp is done with a slot.
    __device__ void release(int slot) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&drained[slot]));
    }
    // This thread is done with an item.
    __device__ void release_item(int slot) const { barrier_arrive(shared_address(&item_drained[slot])); }
};

// A loading warp: streams its page of each tile through the stages, always as far ahead as there are stages,
// across the borders of items. The first one, the leader, also claims the items and hands them to all others.
template <typename T, int kHeadDim, int kStages>
class Loader {
  public:
    __device__ Loader(const SharedPrefixAttentionParams& p, Pipeline<kStages>& pipeline, uint32_t stages)
        : p_(p), pipeline_(pipeline), stages_(stages), total_(*p.num_entries * p.num_kv_heads) {}

    // The first item is taken, and loaded as far as the stages go if requests share it, while the kernel
    // ahead still runs.
    __device__ void run() {
#if __CUDA_ARCH__ >= 900
        if (lane() == 0) {
            prefetch_map(p_.key_map);
            prefetch_map(p_.value_map);
        }
#endif
        next_ = blockIdx.x;
        take_item();
        int early = is_shared_ ? kStages : 0;  // tiles that are loaded before the kernel ahead has ended
        if (kv_head_ < 0) wait_for_kernel_ahead();
        for (; kv_head_ >= 0; early = -1) {
            load_tiles(early);
            take_item();
        }
    }

  private:
    static constexpr uint32_t kSlotBytes = kTileTokens * kHeadDim * 2;

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int loader() { return threadIdx.x / 32 - kWarps; }
    __device__ static bool is_leader() { return loader() == 0; }

    // The leader hands out item `next_`.
    __device__ void publish() {
        ItemSlot& slot = pipeline_.items[item_cursor_.slot];
        barrier_wait(shared_address(&pipeline_.item_drained[item_cursor_.slot]), item_cursor_.parity ^ 1);
        const WorkItem item = next_ < total_ ? read_work(p_, next_) : WorkItem{-1};
        if (item.num_members == 1) {
            if (lane() == 0) slot.members[0] = make_int2(item.representative, item.part);
        } else {
            const int2* members = reinterpret_cast<const int2*>(p_.members) + item.first_member;
            for (int i = lane(); i < item.num_members; i += 32) slot.members[i] = members[i];
        }
        if (lane() == 0) slot.item = item;
        barrier_arrive(shared_address(&pipeline_.item_filled[item_cursor_.slot]));
    }

    __device__ void take_item() {
        if (is_leader()) publish();
        barrier_wait(shared_address(&pipeline_.item_filled[item_cursor_.slot]), item_cursor_.parity);
        const WorkItem& item = pipeline_.items[item_cursor_.slot].item;
        kv_head_ = item.kv_head;
        is_shared_ = item.num_members > 1;
        const int first_page = item.begin / kBlockTokens;
        num_pages_ = (item.end - 1) / kBlockTokens + 1 - first_page;
        table_ = p_.block_tables + size_t(item.representative) * p_.max_blocks + first_page + loader();
        pipeline_.release_item(item_cursor_.slot);
        page_ids_ = kv_head_ < 0 ? 0 : load_page_ids(0);
        item_cursor_.advance();
    }

    // A lane gets the id of this warp's page of tile `tile` + lane.
    __device__ int load_page_ids(int tile) const {
        const int page = (tile + lane()) * kLoaders;
        return page + loader() < num_pages_ ? table_[page] : 0;
    }

    // `early`: how many tiles need not wait for the kernel ahead; -1: it has ended.
    __device__ void load_tiles(int early) {
        const int num_tiles = max(1, (num_pages_ + kLoaders - 1) / kLoaders);
        const int claim_at = min(max(early, 0), num_tiles);
        int claimed = 0, upcoming = page_ids_;
        for (int tile = 0; tile <= num_tiles; ++tile) {
            if (tile == claim_at) {
                if (early >= 0) wait_for_kernel_ahead();
                if (is_leader() && lane() == 0) claimed = atomicAdd(p_.next_work, 1);
            }
            if (tile < num_tiles) load(false, tile, tile % 32 ? page_ids_ : upcoming);
            if (tile > 0) load(true, tile - 1, page_ids_);
            if (tile % 32 == 0) page_ids_ = upcoming;
            if (tile % 32 == 16) upcoming = load_page_ids(tile + 16);
            if (tile == claim_at && is_leader()) prefetch_next(__shfl_sync(0xffffffff, claimed, 0));
        }
    }

    // Brings the entry of the item that a claim gave into the cache.
    __device__ void prefetch_next(int claimed) {
        next_ = int(gridDim.x) + claimed;
        if (next_ >= total_) return;
        int word;
        asm volatile("ld.global.ca.b32 %0, [%1];\n"
                     : "=r"(word)
                     : "l"(p_.entries + next_ / p_.num_kv_heads * kEntryFields));
    }

    __device__ void load(bool is_value, int tile, int page_ids) {
        const int slot = cursor_.slot;
        barrier_wait(shared_address(&pipeline_.drained[slot]), cursor_.parity);
        const uint32_t rows = uniform(stages_ + slot * kSlotBytes + loader() * kBlockTokens * 128);
        const uint32_t filled = uniform(shared_address(&pipeline_.filled[slot]));
        const int page_id = int(uniform(lane() == tile % 32 ? page_ids : 0));
        load_page<T, kHeadDim>(p_, int(uniform(kv_head_)), page_id, tile * kLoaders + loader() < num_pages_,
                               is_value, rows, filled);
        cursor_.advance();
    }

    const SharedPrefixAttentionParams& p_;
    Pipeline<kStages>& pipeline_;
    const uint32_t stages_;
    const int total_;
    Cursor<2 * kStages> cursor_{0, 1};  // a fresh barrier counts as drained
    Cursor<Pipeline<kStages>::kItems> item_cursor_;
    int next_ = 0;  // the leader's
    int kv_head_ = -1, num_pages_ = 0;
    bool is_shared_ = false;
    const int32_t* table_ = nullptr;  // this warp's page of the item's first tile
    int page_ids_ = 0;
};

}  // namespace parrot
