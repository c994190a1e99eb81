// Arrays in chunks: growing copies nothing and stalls nobody, and memory that is not used goes back.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

namespace parrot::scheduler {

// An array that grows and shrinks at its end, one chunk at a time; new items are value-initialised. One chunk
// behind the last is kept when it shrinks, so that a size that sways over the edge of a chunk costs nothing.
template <class T, size_t kChunkItems = 4096>
class ChunkedArray {
  public:
    void resize(size_t num_items) {
        for (size_t i = num_items; i < size_; ++i) (*this)[i] = T{};
        const size_t needed = (num_items + kChunkItems - 1) / kChunkItems;
        while (chunks_.size() < needed) chunks_.push_back(std::make_unique<T[]>(kChunkItems));
        if (chunks_.size() > needed + 1) chunks_.resize(needed + 1);
        size_ = num_items;
    }

    size_t size() const { return size_; }
    size_t num_bytes() const { return chunks_.size() * kChunkItems * sizeof(T); }
    T& operator[](size_t index) { return chunks_[index / kChunkItems][index % kChunkItems]; }
    const T& operator[](size_t index) const { return chunks_[index / kChunkItems][index % kChunkItems]; }

  private:
    static_assert(std::has_single_bit(kChunkItems));

    std::vector<std::unique_ptr<T[]>> chunks_;
    size_t size_ = 0;
};

// Items under ids that are used again once freed, the lowest first, so that live items gather in few chunks.
// A chunk without live items is given back, but for one that is kept for the next growth.
template <class T>
class Pool {
  public:
    static constexpr uint32_t kChunkItems = 64 * 64;

    // The item is value-initialised.
    uint32_t allocate() {
        const size_t chunk_id = chunk_with_room();
        Chunk& chunk = *chunks_[chunk_id];
        const auto word = static_cast<uint32_t>(std::countr_one(chunk.full_words));
        const auto bit = static_cast<uint32_t>(std::countr_one(chunk.used[word]));
        chunk.used[word] |= uint64_t{1} << bit;
        if (chunk.used[word] == kAllOnes) chunk.full_words |= uint64_t{1} << word;
        if (++chunk.num_used == kChunkItems) has_room_[chunk_id / 64] &= ~(uint64_t{1} << chunk_id % 64);
        ++size_;
        const uint32_t id = static_cast<uint32_t>(chunk_id) * kChunkItems + word * 64 + bit;
        num_slots_ = std::max(num_slots_, size_t{id} + 1);
        new (place_of(id)) T{};
        return id;
    }

    void free(uint32_t id) {
        const size_t chunk_id = id / kChunkItems;
        Chunk& chunk = *chunks_[chunk_id];
        const uint32_t word = id % kChunkItems / 64;
        chunk.used[word] &= ~(uint64_t{1} << id % 64);
        chunk.full_words &= ~(uint64_t{1} << word);
        has_room_[chunk_id / 64] |= uint64_t{1} << chunk_id % 64;
        --size_;
        if (--chunk.num_used == 0) give_back(chunk_id);
    }

    T& operator[](uint32_t id) { return *std::launder(reinterpret_cast<T*>(place_of(id))); }
    const T& operator[](uint32_t id) const { return *std::launder(reinterpret_cast<const T*>(place_of(id))); }

    bool contains(uint32_t id) const {
        if (id >= num_slots_) return false;
        return (chunks_[id / kChunkItems]->used[id % kChunkItems / 64] >> id % 64 & 1) != 0;
    }

    // Every id is below this.
    size_t num_slots() const { return num_slots_; }
    size_t size() const { return size_; }
    size_t num_bytes() const { return num_chunks_ * (sizeof(T) * kChunkItems + sizeof(Chunk)); }

  private:
    static constexpr uint64_t kAllOnes = ~uint64_t{0};

    // Room for an item. Not initialised, so that the system gives a chunk's pages only as they are used.
    struct Place {
        alignas(T) std::array<std::byte, sizeof(T)> bytes;
    };
    static_assert(std::is_trivially_destructible_v<T>);

    struct Chunk {
        uint32_t num_used = 0;
        uint64_t full_words = 0;  // bit i: used[i] has no zero
        std::array<uint64_t, 64> used{};
    };

    std::byte* place_of(uint32_t id) const { return items_[id / kChunkItems][id % kChunkItems].bytes.data(); }

    size_t chunk_with_room() {
        for (size_t i = 0; i < has_room_.size(); ++i) {
            if (has_room_[i] == 0) continue;
            const size_t chunk_id = i * 64 + static_cast<size_t>(std::countr_zero(has_room_[i]));
            if (chunk_id == items_.size()) {
                chunks_.push_back(std::make_unique<Chunk>());
                items_.emplace_back();
            }
            if (items_[chunk_id] == nullptr) items_[chunk_id] = new_items();
            return chunk_id;
        }
        has_room_.push_back(kAllOnes);
        return chunk_with_room();
    }

    std::unique_ptr<Place[]> new_items() {
        ++num_chunks_;
        if (spare_ != nullptr) return std::move(spare_);
        return std::make_unique_for_overwrite<Place[]>(kChunkItems);
    }

    void give_back(size_t chunk_id) {
        --num_chunks_;
        spare_ = std::move(items_[chunk_id]);
        while (!chunks_.empty() && chunks_.back()->num_used == 0) {
            chunks_.pop_back();
            items_.pop_back();
        }
        has_room_.resize((items_.size() + 63) / 64);
        num_slots_ = std::min(num_slots_, items_.size() * kChunkItems);
    }

    std::vector<std::unique_ptr<Place[]>> items_;
    std::vector<std::unique_ptr<Chunk>> chunks_;
    std::vector<uint64_t> has_room_;  // a bit per chunk; ones behind the last
    std::unique_ptr<Place[]> spare_;
    size_t num_chunks_ = 0;
    size_t num_slots_ = 0;
    size_t size_ = 0;
};

}  // namespace parrot::scheduler
