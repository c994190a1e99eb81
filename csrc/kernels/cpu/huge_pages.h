// Memory for weights: read in full at every step, so it should lie on huge pages (a quarter more bandwidth
// was measured than on pages of 4 KiB), which the system gives only for whole, aligned 2 MiB.
#pragma once

#include <cstddef>
#include <memory>

namespace parrot::cpu {

// `bytes` of memory, zeroed, at a multiple of 64. Small pieces share chunks; a chunk goes back to the system
// with the last of its pieces. Throws std::bad_alloc.
std::shared_ptr<std::byte> allocate_weights(size_t bytes);

}  // namespace parrot::cpu
