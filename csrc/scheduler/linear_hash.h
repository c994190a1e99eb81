// A hash table that grows one bucket at a time (linear hashing), so that no insertion waits for a rehash.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "scheduler/chunked.h"

namespace parrot::scheduler {

// Maps 32-bit hashes to ids; several ids may have one hash. A bucket is a cache line with the whole hash of
// each of its ids, so that a look-up reads one line, mostly, before it knows the id.
//
//   buckets   | 0 | 1 | 2 | 3 | 4 | 5 |    six buckets: hash mod 8, or mod 4 where that bucket is yet to come
//                   |                      bucket 6 will take its part of bucket 2, and so on in turn
//                   +-> | overflow |
class LinearHash {
  public:
    static constexpr uint32_t kNone = ~uint32_t{0};

    LinearHash() { buckets_.resize(1); }

    // The first id with this hash that `accept` takes; kNone when there is none.
    template <class Accept>
    uint32_t find(uint32_t hash, Accept accept) const {
        for (const Bucket* bucket = &buckets_[home_of(hash)];; bucket = &overflow_[bucket->overflow - 1]) {
            for (uint32_t i = 0; i < bucket->num_used; ++i) {
                if (bucket->hashes[i] == hash && accept(bucket->ids[i])) return bucket->ids[i];
            }
            if (bucket->overflow == 0) return kNone;
        }
    }

    void prefetch(uint32_t hash) const { __builtin_prefetch(&buckets_[home_of(hash)]); }

    void insert(uint32_t hash, uint32_t id) {
        append(buckets_[home_of(hash)], hash, id);
        if (++size_ > buckets_.size() * kMostPerBucket) split();
    }

    // The id must be there under this hash.
    void erase(uint32_t hash, uint32_t id);

    size_t size() const { return size_; }
    size_t num_bytes() const { return buckets_.num_bytes() + overflow_.num_bytes(); }

    // Throws std::logic_error unless every id is in its bucket and `size()` of them are there.
    void check_invariants() const;

  private:
    static constexpr uint32_t kSlots = 7;
    // On average over all buckets; those that are next to be split have up to twice the least.
    static constexpr size_t kMostPerBucket = 4;
    static constexpr size_t kLeastPerBucket = 2;

    // All zeros when empty.
    struct alignas(64) Bucket {
        uint32_t num_used = 0;
        uint32_t overflow = 0;  // 1 + where it goes on in overflow_, or 0
        std::array<uint32_t, kSlots> hashes;
        std::array<uint32_t, kSlots> ids;
    };

    size_t home_of(uint32_t hash) const {
        const size_t wide = hash & mask_;
        return wide < buckets_.size() ? wide : hash & mask_ >> 1;
    }

    void append(Bucket& bucket, uint32_t hash, uint32_t id);
    void distribute(const Bucket& home);
    void split();
    void merge();
    void resize(size_t num_buckets);

    ChunkedArray<Bucket> buckets_;
    Pool<Bucket> overflow_;
    size_t mask_ = 0;  // the least 2^k - 1 that is not below the last bucket's number
    size_t size_ = 0;
};

}  // namespace parrot::scheduler
