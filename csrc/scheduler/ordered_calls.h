// Queued calls in order, as sorted chunks of one array each: calls mostly come at the end and leave from the
// front, and a search skips the chunks in which no call is small enough.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "scheduler/types.h"

namespace parrot::scheduler {

// A call that must be looked at, whatever room there is: it is new, or its place has changed.
inline constexpr int32_t kFresh = std::numeric_limits<int32_t>::min();

struct QueueEntry {
    QueueKey key;
    Call* call = nullptr;
    uint64_t chain = 0;  // see CallQueue: calls of one chain need the same on every engine, but for `tokens`
    int32_t tokens = 0;  // that the call may come to hold
    int32_t least = kFresh;  // of them, at least so many take room on any engine
};

class OrderedCalls {
  public:
    bool empty() const { return size_ == 0; }
    size_t size() const { return size_; }
    const QueueEntry& front() const { return chunks_.front().first(); }

    void insert(const QueueEntry& entry);
    void erase(const QueueKey& key);
    // Replaces the entry of the same key.
    void update(const QueueEntry& entry);
    const QueueEntry& at(const QueueKey& key) const;

    // The first entry after `after` that takes at most `room` and that `accept` takes; null if none.
    template <class Accept>
    const QueueEntry* next(const QueueKey& after, int64_t room, Accept accept);

    // Visits the entries after `after` in order until `visit` returns false.
    template <class Visit>
    void visit_after(const QueueKey& after, Visit visit) const;

  private:
    struct Chunk {
        QueueKey last;
        int32_t least = std::numeric_limits<int32_t>::max();  // of no entry less
        uint32_t begin = 0;                                   // entries before it have left
        std::vector<QueueEntry> entries;

        const QueueEntry& first() const { return entries[begin]; }
    };
    static constexpr size_t kMaxEntries = 128;

    // The first chunk whose last key is not below `key`; chunks_.size() if none.
    size_t chunk_of(const QueueKey& key) const;
    static size_t entry_of(const Chunk& chunk, const QueueKey& key);
    void append(const QueueEntry& entry);
    void split(size_t chunk);

    size_t size_ = 0;
    std::vector<Chunk> chunks_;
    std::vector<QueueEntry> spare_;  // of the last chunk that went
};

template <class Accept>
const QueueEntry* OrderedCalls::next(const QueueKey& after, int64_t room, Accept accept) {
    for (size_t c = chunk_of(after); c < chunks_.size(); ++c) {
        Chunk& chunk = chunks_[c];
        if (chunk.least > room) continue;
        size_t i = entry_of(chunk, after);
        if (i < chunk.entries.size() && chunk.entries[i].key == after) ++i;
        const bool sees_all = i == chunk.begin;
        int32_t least = std::numeric_limits<int32_t>::max();
        for (; i < chunk.entries.size(); ++i) {
            const QueueEntry& entry = chunk.entries[i];
            if (entry.least <= room && accept(entry)) return &entry;
            least = std::min(least, entry.least);
        }
        if (sees_all) chunk.least = least;
    }
    return nullptr;
}

template <class Visit>
void OrderedCalls::visit_after(const QueueKey& after, Visit visit) const {
    for (size_t c = chunk_of(after); c < chunks_.size(); ++c) {
        const Chunk& chunk = chunks_[c];
        for (size_t i = entry_of(chunk, after); i < chunk.entries.size(); ++i) {
            if (chunk.entries[i].key != after && !visit(chunk.entries[i])) return;
        }
    }
}

}  // namespace parrot::scheduler
