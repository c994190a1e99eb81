#include "kernels/cpu/huge_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

namespace parrot::cpu {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kChunk = size_t{32} << 20;
constexpr size_t kAlignment = 64;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Address space of which only what is written takes memory.
struct Chunk {
    explicit Chunk(size_t bytes) : mapped(bytes + kHugePage) {
        base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        const size_t address = reinterpret_cast<size_t>(base);
        begin = static_cast<std::byte*>(base) + (round_up(address, kHugePage) - address);
        capacity = bytes;
#if defined(MADV_HUGEPAGE)
        madvise(begin, capacity, MADV_HUGEPAGE);  // a wish; without it the pages are small
#endif
    }
    Chunk(const Chunk&) = delete;
    Chunk& operator=(const Chunk&) = delete;
    ~Chunk() { munmap(base, mapped); }

    size_t mapped;
    void* base;
    std::byte* begin;
    size_t capacity;
    size_t used = 0;
};

std::mutex g_mutex;
std::weak_ptr<Chunk> g_current;

}  // namespace

std::shared_ptr<std::byte> allocate_weights(size_t bytes) {
    const size_t size = round_up(std::max<size_t>(bytes, 1), kAlignment);
    const std::lock_guard lock(g_mutex);
    std::shared_ptr<Chunk> chunk = g_current.lock();
    if (!chunk || chunk->capacity - chunk->used < size) {
        chunk = std::make_shared<Chunk>(round_up(std::max(size, kChunk), kHugePage));
        g_current = chunk;
    }
    std::byte* piece = chunk->begin + chunk->used;
    chunk->used += size;
    return {chunk, piece};
}

}  // namespace parrot::cpu
