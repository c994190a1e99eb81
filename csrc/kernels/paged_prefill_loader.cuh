// The loading side of paged prefill: two warps for keys and two for values; see paged_prefill.cuh.
#pragma once

#include <cstdint>

#include "kernels/cursor.cuh"
#include "kernels/instructions.cuh"
#include "kernels/paged_prefill_work.cuh"

namespace parrot::prefill {

// A loading warp: every other page of the keys or of the values. The first one, the leader, also claims the
// items, hands them to all others and loads the queries. Tiles of an item come from the last to the first:
// those of the diagonal before those that all rows see.
template <typename T, int kHeadDim, bool kIsValue>
class Loader {
  public:
    // `memory`: the query and the stages of both rings.
    __device__ Loader(const Params& p, Pipeline<kHeadDim>& pipeline, uint32_t memory)
        : p_(p),
          ring_(kIsValue ? pipeline.values : pipeline.keys),
          pipeline_(pipeline),
          query_(memory),
          stages_(memory + (1 + kStages<kHeadDim> * kIsValue) * kTileBytes<kHeadDim>) {}

    __device__ void run() {
        if (lane() == 0) prefetch_map(kIsValue ? p_.value_map : p_.key_map);
        for (int work = blockIdx.x;;) {
            if (is_leader()) publish(work);
            take_item();
            if (item_.head < 0) return;
            uint32_t claimed = 0;  // wraps to zero with the last claim of all blocks
            if (is_leader() && lane() == 0) claimed = atomicInc(p_.next_work, num_items(p_) - 1);
            const int last = item_.num_tiles() - 1;
            for (int tile = last; tile >= 0; --tile) {
                if (tile == last || tile % kIdTiles == kIdTiles - 1) load_page_ids(tile);
                load_tile(tile);
                if (is_leader() && tile == last) load_query();
            }
            work = int(gridDim.x + __shfl_sync(0xffffffff, claimed, 0));
        }
    }

  private:
    static constexpr int kIdTiles = 32 / kPages;  // tiles whose page ids a warp holds

    __device__ static int lane() { return threadIdx.x % 32; }
    __device__ static int warp() { return threadIdx.x / 32 - kComputingWarps; }
    __device__ static bool is_leader() { return !kIsValue && warp() == 0; }
    __device__ static int first_page() { return warp() % kPageLoaders; }
    __device__ int kv_head() const { return item_.head / (p_.num_heads / p_.num_kv_heads); }

    __device__ void publish(int work) {
        const Item item = read_item(p_, work);
        pipeline_.items.wait_drained(item_at_);
        if (lane() == 0) pipeline_.item[item_at_.slot] = item;
        barrier_arrive(shared_address(&pipeline_.items.filled[item_at_.slot]));
    }

    __device__ void take_item() {
        pipeline_.items.wait_filled(item_at_);
        item_ = pipeline_.item[item_at_.slot];
        pipeline_.items.release_thread(item_at_.slot);
        item_at_.advance();
        table_ = p_.block_tables + size_t(item_.table) * p_.max_blocks;
        num_pages_ = (item_.end() - 1) / kBlockTokens + 1;
        if (item_.head >= 0) upcoming_ids_ = read_page_ids(item_.num_tiles() - 1);
    }

    // A lane gets the id of one of the 32 pages that tile `tile` is among.
    __device__ int read_page_ids(int tile) const {
        const int page = tile / kIdTiles * 32 + lane();
        return tile >= 0 && page < num_pages_ ? table_[page] : 0;
    }

    // Those of the tiles that come after these are read too, before they are needed.
    __device__ void load_page_ids(int tile) {
        page_ids_ = upcoming_ids_;
        upcoming_ids_ = read_page_ids(tile / kIdTiles * kIdTiles - 1);
    }

    __device__ void load_query() {
        pipeline_.query.wait_drained(query_at_);
        if (lane() == 0) {
            const uint32_t filled = shared_address(&pipeline_.query.filled[0]);
            barrier_expect(filled, kRows * kHeadDim * 2);
#pragma unroll
            for (int half = 0; half < kHeadDim / 64; ++half) {
                copy_box(query_ + half * kColumnBytes, p_.query_map, filled,
                         item_.head * kHeadDim + half * 64, item_.first_row);
            }
        }
        __syncwarp();
        query_at_.advance();
    }

    // The end of a sequence may be within a page. What is behind it, NaN perhaps, does no harm in a key,
    // whose score is masked. In a value even a weight of zero would spread it: no bulk copy then.
    __device__ void load_tile(int tile) {
        ring_.wait_drained(at_);
        const uint32_t rows = stages_ + at_.slot * kTileBytes<kHeadDim>;
        const int tokens = min(kTokens, item_.end() - tile * kTokens);
        if (kIsValue && tokens < kTokens) copy_last_values(rows, tile, tokens);
        const int pages = (tokens + (kIsValue ? 0 : kBlockTokens - 1)) / kBlockTokens;
        copy_pages(rows, uniform(shared_address(&ring_.filled[at_.slot])), tile, pages);
        at_.advance();
    }

    // This warp's pages among the first `pages` of a tile.
    __device__ void copy_pages(uint32_t rows, uint32_t filled, int tile, int pages) {
        constexpr int kPageBytes = kBlockTokens * kHeadDim * 2;
        const int count = (pages - first_page() + kPageLoaders - 1) / kPageLoaders;
        const CUtensorMap& map = kIsValue ? p_.value_map : p_.key_map;
        const int column = int(uniform(kv_head() * kHeadDim));
        if (lane() == 0) barrier_expect(filled, count * kPageBytes);
        __syncwarp();
#pragma unroll
        for (int index = 0; index < kPages / kPageLoaders; ++index) {
            const int page = first_page() + index * kPageLoaders;
            const int id = int(uniform(lane() == tile % kIdTiles * kPages + page ? page_ids_ : 0));
            const uint32_t target = rows + page * kBlockTokens * 128;
            if (index >= count || !is_elected()) continue;
#pragma unroll
            for (int half = 0; half < kHeadDim / 64; ++half) {
                copy_box(target + half * kColumnBytes, map, filled, column + half * 64, id * kBlockTokens);
            }
        }
    }

    // Writes the rows of a tile with `tokens` tokens behind its last whole page: zero behind the last token.
    __device__ void copy_last_values(uint32_t rows, int tile, int tokens) {
        constexpr int kChunks = kHeadDim / 8;  // of 16 bytes in a row
        const int first = tokens / kBlockTokens * kBlockTokens;
        const size_t page =
            __shfl_sync(0xffffffff, page_ids_, tile % kIdTiles * kPages + first / kBlockTokens);
        const T* values = static_cast<const T*>(p_.value_cache) +
                          (page * kBlockTokens * p_.num_kv_heads + kv_head()) * kHeadDim;
        for (int index = first_page() * 32 + lane(); index < (kTokens - first) * kChunks;
             index += 32 * kPageLoaders) {
            const int row = first + index / kChunks, chunk = index % kChunks;
            uint4 value = make_uint4(0, 0, 0, 0);
            if (row < tokens) {
                value = *reinterpret_cast<const uint4*>(
                    values + size_t(row - first) * p_.num_kv_heads * kHeadDim + chunk * 8);
            }
            const uint32_t at = rows + chunk / 8 * kColumnBytes + row * 128 + ((chunk % 8) ^ (row % 8)) * 16;
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(at), "r"(value.x), "r"(value.y),
                         "r"(value.z), "r"(value.w)
                         : "memory");
        }
        fence_shared_writes();
        __syncwarp();
    }

    const Params& p_;
    Ring<kStages<kHeadDim>>& ring_;
    Pipeline<kHeadDim>& pipeline_;
    const uint32_t query_, stages_;
    Cursor<kStages<kHeadDim>> at_;
    Cursor<kItems> item_at_;
    Cursor<1> query_at_;
    Item item_;
    const int32_t* table_ = nullptr;
    int num_pages_ = 0;
    int page_ids_ = 0, upcoming_ids_ = 0;
};

}  // namespace parrot::prefill
