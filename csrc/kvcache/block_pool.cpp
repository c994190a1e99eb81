#include "kvcache/block_pool.h"

#include <stdexcept>

namespace parrot::kvcache {

BlockPool::BlockPool(std::int32_t num_blocks) : num_references_(static_cast<std::size_t>(num_blocks), 0) {
    free_.reserve(num_references_.size());
    for (std::int32_t block = num_blocks - 1; block >= 0; --block) free_.push_back(block);
}

std::int32_t BlockPool::allocate() {
    if (free_.empty()) throw std::logic_error("BlockPool::allocate: no block is free");
    const std::int32_t block = free_.back();
    free_.pop_back();
    num_references_[static_cast<std::size_t>(block)] = 1;
    return block;
}

void BlockPool::release(std::int32_t block) {
    if (--num_references_[static_cast<std::size_t>(block)] == 0) free_.push_back(block);
}

}  // namespace parrot::kvcache
