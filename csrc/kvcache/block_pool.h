// The blocks of the KV cache: who is free, and how many nodes refer to each of the others.
#pragma once

#include <cstdint>
#include <vector>

namespace parrot::kvcache {

/// Block ids [0, num_blocks), each free or referred to by one or more nodes. Callers keep ids in range.
class BlockPool {
  public:
    explicit BlockPool(std::int32_t num_blocks);

    /// A free block, with one reference. Throws std::logic_error when there is none: callers make room first.
    std::int32_t allocate();
    void retain(std::int32_t block) { ++num_references_[static_cast<std::size_t>(block)]; }
    /// Drop one reference; the block is free after the last one.
    void release(std::int32_t block);

    std::int32_t num_blocks() const { return static_cast<std::int32_t>(num_references_.size()); }
    std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
    std::int32_t num_used() const { return num_blocks() - num_free(); }
    const std::vector<std::int32_t>& num_references() const { return num_references_; }  // [num_blocks]
    const std::vector<std::int32_t>& free_blocks() const { return free_; }

  private:
    std::vector<std::int32_t> num_references_;  // [num_blocks], 0: free
    std::vector<std::int32_t> free_;            // last in, first out
};

}  // namespace parrot::kvcache
