#include "scheduler/ordered_calls.h"

#include <iterator>
#include <stdexcept>
#include <utility>

namespace parrot::scheduler {

void OrderedCalls::insert(const QueueEntry& entry) {
    ++size_;
    if (chunks_.empty() || entry.key > chunks_.back().last) {
        append(entry);
        return;
    }
    const size_t c = chunk_of(entry.key);
    Chunk& chunk = chunks_[c];
    const size_t at = entry_of(chunk, entry.key);
    if (at == chunk.begin && at > 0) {
        chunk.entries[--chunk.begin] = entry;
    } else {
        chunk.entries.insert(chunk.entries.begin() + static_cast<std::ptrdiff_t>(at), entry);
    }
    chunk.least = std::min(chunk.least, entry.least);
    if (chunk.entries.size() - chunk.begin > kMaxEntries) split(c);
}

void OrderedCalls::append(const QueueEntry& entry) {
    if (chunks_.empty() || chunks_.back().entries.size() >= kMaxEntries) {
        chunks_.emplace_back().entries = std::move(spare_);
        spare_ = {};
    }
    Chunk& chunk = chunks_.back();
    chunk.entries.push_back(entry);
    chunk.last = entry.key;
    chunk.least = std::min(chunk.least, entry.least);
}

void OrderedCalls::erase(const QueueKey& key) {
    const size_t c = chunk_of(key);
    if (c == chunks_.size()) throw std::logic_error("erase of a call that is not in the queue");
    Chunk& chunk = chunks_[c];
    const size_t at = entry_of(chunk, key);
    if (at == chunk.entries.size() || chunk.entries[at].key != key) {
        throw std::logic_error("erase of a call that is not in the queue");
    }
    --size_;
    if (at == chunk.begin) {
        ++chunk.begin;
    } else {
        chunk.entries.erase(chunk.entries.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (chunk.begin == chunk.entries.size()) {
        chunk.entries.clear();
        spare_ = std::move(chunk.entries);
        chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(c));
    } else {
        chunk.last = chunk.entries.back().key;
    }
}

void OrderedCalls::update(const QueueEntry& entry) {
    Chunk& chunk = chunks_[chunk_of(entry.key)];
    chunk.entries[entry_of(chunk, entry.key)] = entry;
    chunk.least = std::min(chunk.least, entry.least);
}

const QueueEntry& OrderedCalls::at(const QueueKey& key) const {
    const Chunk& chunk = chunks_[chunk_of(key)];
    return chunk.entries[entry_of(chunk, key)];
}

size_t OrderedCalls::chunk_of(const QueueKey& key) const {
    const auto chunk = std::ranges::lower_bound(chunks_, key, {}, &Chunk::last);
    return static_cast<size_t>(chunk - chunks_.begin());
}

size_t OrderedCalls::entry_of(const Chunk& chunk, const QueueKey& key) {
    const auto begin = chunk.entries.begin() + static_cast<std::ptrdiff_t>(chunk.begin);
    const auto entry = std::ranges::lower_bound(begin, chunk.entries.end(), key, {}, &QueueEntry::key);
    return static_cast<size_t>(entry - chunk.entries.begin());
}

void OrderedCalls::split(size_t c) {
    Chunk& chunk = chunks_[c];
    const auto begin = chunk.entries.begin() + static_cast<std::ptrdiff_t>(chunk.begin);
    const auto middle = begin + (chunk.entries.end() - begin) / 2;
    Chunk later{chunk.last, chunk.least, 0, {middle, chunk.entries.end()}};
    chunk.entries.erase(middle, chunk.entries.end());
    chunk.last = chunk.entries.back().key;
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(c) + 1, std::move(later));
}

}  // namespace parrot::scheduler
