// Objects in blocks: their addresses stay, their slots are used again, and taking one costs no allocation
// once there have been as many before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace parrot::scheduler {

template <class T>
class Slab {
  public:
    // A slot whose object is as T{} makes it, unless `give` was told to leave it as it was.
    uint32_t take() {
        if (free_.empty()) add_block();
        const uint32_t slot = free_.back();
        free_.pop_back();
        return slot;
    }

    void give(uint32_t slot) {
        (*this)[slot] = T{};
        free_.push_back(slot);
    }

    // Leaves the object as it is, so that the next user finds its memory.
    void give_as_is(uint32_t slot) { free_.push_back(slot); }

    T& operator[](uint32_t slot) { return blocks_[slot / kBlock][slot % kBlock]; }
    const T& operator[](uint32_t slot) const { return blocks_[slot / kBlock][slot % kBlock]; }

    size_t size() const { return blocks_.size() * kBlock - free_.size(); }

  private:
    static constexpr uint32_t kBlock = 256;

    void add_block() {
        const auto first = static_cast<uint32_t>(blocks_.size()) * kBlock;
        blocks_.push_back(std::make_unique<T[]>(kBlock));
        free_.reserve(blocks_.size() * kBlock);
        for (uint32_t i = kBlock; i-- > 0;) free_.push_back(first + i);
    }

    std::vector<std::unique_ptr<T[]>> blocks_;
    std::vector<uint32_t> free_;
};

}  // namespace parrot::scheduler
