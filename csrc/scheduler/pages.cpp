#include "scheduler/pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace parrot::scheduler {

void UnmapPages::operator()(std::byte* pages) const { munmap(pages, num_bytes); }

Pages map_pages(size_t num_bytes, bool huge) {
    const size_t mapped_bytes = num_bytes + (huge ? kHugePageBytes : 0);
    void* mapped = mmap(nullptr, mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* pages = static_cast<std::byte*>(mapped);
    if (huge) {
        const size_t before = -reinterpret_cast<uintptr_t>(pages) % kHugePageBytes;
        if (before > 0) munmap(pages, before);
        pages += before;
        if (before < kHugePageBytes) munmap(pages + num_bytes, kHugePageBytes - before);
#ifdef MADV_HUGEPAGE
        madvise(pages, num_bytes, MADV_HUGEPAGE);  // small pages serve as well
#endif
    }
    return Pages(pages, UnmapPages{num_bytes});
}

}  // namespace parrot::scheduler
