// Memory straight from the system, in blocks of whole pages.
#pragma once

#include <cstddef>
#include <memory>

namespace parrot::scheduler {

struct UnmapPages {
    size_t num_bytes = 0;
    void operator()(std::byte* pages) const;
};
using Pages = std::unique_ptr<std::byte, UnmapPages>;

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

// Zeros, of which the system provides a page when it is touched first. `huge`: aligned to 2 MiB and asked to
// be of such pages, which cost memory in pieces of that size and spare the walk through the page table that
// most random accesses to much memory need. Throws std::bad_alloc.
Pages map_pages(size_t num_bytes, bool huge);

}  // namespace parrot::scheduler
