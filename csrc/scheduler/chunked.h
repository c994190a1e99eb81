// Arrays in chunks: growing copies nothing and stalls nobody, and memory that is not used goes back. The
// first chunk is of small pages and stays, the others are of huge ones.
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

#include "scheduler/pages.h"

namespace parrot::scheduler {

// An array that grows and shrinks at its end. New items are all zeros. One chunk behind the last is kept when
// it shrinks, so that a size that sways over the edge of a chunk costs nothing.
template <class T>
class ChunkedArray {
  public:
    void resize(size_t num_items) {
        for (size_t i = num_items; i < size_; ++i) (*this)[i] = T{};
        const size_t needed = (num_items + kChunkItems - 1) / kChunkItems;
        while (chunks_.size() < needed) chunks_.push_back(map_pages(kHugePageBytes, !chunks_.empty()));
        if (chunks_.size() > needed + 1) chunks_.resize(needed + 1);
        size_ = num_items;
    }

    size_t size() const { return size_; }
    size_t num_bytes() const { return size_ * sizeof(T); }
    T& operator[](size_t index) { return items(index)[index % kChunkItems]; }
    const T& operator[](size_t index) const { return items(index)[index % kChunkItems]; }

  private:
    static constexpr size_t kChunkItems = kHugePageBytes / sizeof(T);
    static_assert(std::has_single_bit(sizeof(T)) && std::is_trivially_copyable_v<T>);

    T* items(size_t index) const { return reinterpret_cast<T*>(chunks_[index / kChunkItems].get()); }

    std::vector<Pages> chunks_;
    size_t size_ = 0;
};

// Places of equal size under ids that are used again once freed, the lowest first, so that what is in use
// gathers in few chunks of 64 * kWords places. A chunk without any in use is given back, but for one that is
// kept for the next growth. Places are not initialised.
template <uint32_t kWords>
class RawPool {
  public:
    static constexpr uint32_t kChunkItems = 64 * kWords;

    explicit RawPool(size_t item_bytes) : item_bytes_(item_bytes) {}

    uint32_t allocate() {
        const size_t chunk_id = chunk_with_room();
        Chunk& chunk = *chunks_[chunk_id];
        uint32_t group = 0;
        while (chunk.full_words[group] == kAllOnes) ++group;
        const uint32_t word = group * 64 + static_cast<uint32_t>(std::countr_one(chunk.full_words[group]));
        const auto bit = static_cast<uint32_t>(std::countr_one(chunk.used[word]));
        chunk.used[word] |= uint64_t{1} << bit;
        if (chunk.used[word] == kAllOnes) chunk.full_words[group] |= uint64_t{1} << word % 64;
        if (++chunk.num_used == kChunkItems) has_room_[chunk_id / 64] &= ~(uint64_t{1} << chunk_id % 64);
        ++size_;
        const uint32_t id = static_cast<uint32_t>(chunk_id) * kChunkItems + word * 64 + bit;
        num_slots_ = std::max(num_slots_, size_t{id} + 1);
        return id;
    }

    void free(uint32_t id) {
        const size_t chunk_id = id / kChunkItems;
        Chunk& chunk = *chunks_[chunk_id];
        const uint32_t word = id % kChunkItems / 64;
        chunk.used[word] &= ~(uint64_t{1} << id % 64);
        chunk.full_words[word / 64] &= ~(uint64_t{1} << word % 64);
        has_room_[chunk_id / 64] |= uint64_t{1} << chunk_id % 64;
        first_room_ = std::min(first_room_, chunk_id / 64);
        --size_;
        if (--chunk.num_used == 0 && chunk_id > 0) give_back(chunk_id);
    }

    // Chunks begin with a page.
    std::byte* chunk(uint32_t id) const { return places_[id / kChunkItems].get(); }
    std::byte* place(uint32_t id) const { return chunk(id) + id % kChunkItems * item_bytes_; }

    bool contains(uint32_t id) const {
        if (id >= num_slots_) return false;
        return (chunks_[id / kChunkItems]->used[id % kChunkItems / 64] >> id % 64 & 1) != 0;
    }

    // Every id is below this.
    size_t num_slots() const { return num_slots_; }
    size_t size() const { return size_; }
    // Of the chunks, of the last as far as it has been used, and of the one kept.
    size_t num_bytes() const {
        const size_t last = num_slots_ % kChunkItems;
        const size_t kept = spare_ != nullptr ? kChunkItems : 0;
        return (num_chunks_ * kChunkItems + kept - (last > 0 ? kChunkItems - last : 0)) * item_bytes_;
    }

  private:
    static constexpr uint64_t kAllOnes = ~uint64_t{0};
    static_assert(kWords % 64 == 0);

    struct Chunk {
        uint32_t num_used = 0;
        std::array<uint64_t, kWords / 64> full_words{};  // a bit per word of `used`: it has no zero
        std::array<uint64_t, kWords> used{};
    };

    size_t chunk_with_room() {
        while (first_room_ < has_room_.size() && has_room_[first_room_] == 0) ++first_room_;
        if (first_room_ == has_room_.size()) has_room_.push_back(kAllOnes);
        const size_t chunk_id =
            first_room_ * 64 + static_cast<size_t>(std::countr_zero(has_room_[first_room_]));
        if (chunk_id == places_.size()) {
            chunks_.push_back(std::make_unique<Chunk>());
            places_.emplace_back();
        }
        if (places_[chunk_id] == nullptr) places_[chunk_id] = new_places(chunk_id);
        return chunk_id;
    }

    Pages new_places(size_t chunk_id) {
        ++num_chunks_;
        if (spare_ != nullptr) return std::move(spare_);
        return map_pages(item_bytes_ * kChunkItems, chunk_id > 0);
    }

    void give_back(size_t chunk_id) {
        --num_chunks_;
        spare_ = std::move(places_[chunk_id]);
        if (size_ < kChunkItems / 2) spare_.reset();
        while (places_.size() > 1 && chunks_.back()->num_used == 0) {
            chunks_.pop_back();
            places_.pop_back();
        }
        has_room_.resize((places_.size() + 63) / 64);
        num_slots_ = std::min(num_slots_, places_.size() * kChunkItems);
    }

    size_t item_bytes_;
    std::vector<Pages> places_;
    std::vector<std::unique_ptr<Chunk>> chunks_;
    std::vector<uint64_t> has_room_;  // a bit per chunk; ones behind the last
    size_t first_room_ = 0;           // no word of has_room_ before this one has a bit
    Pages spare_;
    size_t num_chunks_ = 0;
    size_t num_slots_ = 0;
    size_t size_ = 0;
};

// Items of one type in a RawPool, 2 MiB to a chunk; a new one is value-initialised.
template <class T>
class Pool {
  public:
    uint32_t allocate() {
        const uint32_t id = places_.allocate();
        new (places_.place(id)) T{};
        return id;
    }
    void free(uint32_t id) { places_.free(id); }

    T& operator[](uint32_t id) { return items(id)[id % kChunkItems]; }
    const T& operator[](uint32_t id) const { return items(id)[id % kChunkItems]; }

    bool contains(uint32_t id) const { return places_.contains(id); }
    size_t num_slots() const { return places_.num_slots(); }
    size_t size() const { return places_.size(); }
    size_t num_bytes() const { return places_.num_bytes(); }

  private:
    static_assert(std::is_trivially_destructible_v<T> && std::has_single_bit(sizeof(T)));
    using Places = RawPool<kHugePageBytes / 64 / sizeof(T)>;
    static constexpr uint32_t kChunkItems = Places::kChunkItems;

    T* items(uint32_t id) const { return std::launder(reinterpret_cast<T*>(places_.chunk(id))); }

    Places places_{sizeof(T)};
};

}  // namespace parrot::scheduler
