#include "scheduler/linear_hash.h"

#include <stdexcept>
#include <utility>

#include "concat.h"

namespace parrot::scheduler {

void LinearHash::erase(uint32_t hash, uint32_t id) {
    Bucket* bucket = &buckets_[home_of(hash)];
    uint32_t* hole_hash = nullptr;
    uint32_t* hole_id = nullptr;
    Bucket* before_last = nullptr;
    while (true) {
        for (uint32_t i = 0; i < bucket->num_used; ++i) {
            if (bucket->hashes[i] != hash || bucket->ids[i] != id) continue;
            hole_hash = &bucket->hashes[i];
            hole_id = &bucket->ids[i];
        }
        if (bucket->overflow == 0) break;
        before_last = bucket;
        bucket = &overflow_[bucket->overflow - 1];
    }
    if (hole_id == nullptr) throw std::logic_error(concat("id ", id, " is not in the hash table"));
    --bucket->num_used;  // the last entry of the last bucket fills the hole
    *hole_hash = bucket->hashes[bucket->num_used];
    *hole_id = bucket->ids[bucket->num_used];
    if (bucket->num_used == 0 && before_last != nullptr) {
        overflow_.free(before_last->overflow - 1);
        before_last->overflow = 0;
    }
    if (--size_ < buckets_.size() * kLeastPerBucket && buckets_.size() > 1) merge();
}

void LinearHash::append(Bucket& home, uint32_t hash, uint32_t id) {
    Bucket* bucket = &home;
    while (bucket->num_used == kSlots) {
        if (bucket->overflow == 0) bucket->overflow = overflow_.allocate() + 1;
        bucket = &overflow_[bucket->overflow - 1];
    }
    bucket->hashes[bucket->num_used] = hash;
    bucket->ids[bucket->num_used] = id;
    ++bucket->num_used;
}

// `home` is the copy of a bucket that has been emptied; its overflow buckets are given back.
void LinearHash::distribute(const Bucket& home) {
    Bucket entries = home;
    while (true) {
        for (uint32_t i = 0; i < entries.num_used; ++i) {
            append(buckets_[home_of(entries.hashes[i])], entries.hashes[i], entries.ids[i]);
        }
        if (entries.overflow == 0) return;
        const uint32_t emptied = entries.overflow - 1;
        entries = overflow_[emptied];
        overflow_.free(emptied);
    }
}

void LinearHash::split() {
    const size_t added = buckets_.size();
    resize(added + 1);
    distribute(std::exchange(buckets_[added - std::bit_floor(added)], Bucket{}));
}

void LinearHash::merge() {
    const Bucket last = buckets_[buckets_.size() - 1];
    resize(buckets_.size() - 1);
    distribute(last);
}

void LinearHash::resize(size_t num_buckets) {
    buckets_.resize(num_buckets);
    mask_ = std::bit_ceil(num_buckets) - 1;
}

void LinearHash::check_invariants() const {
    size_t found = 0;
    for (size_t i = 0; i < buckets_.size(); ++i) {
        for (const Bucket* bucket = &buckets_[i];; bucket = &overflow_[bucket->overflow - 1]) {
            for (uint32_t slot = 0; slot < bucket->num_used; ++slot) {
                if (home_of(bucket->hashes[slot]) != i) {
                    throw std::logic_error(concat("id ", bucket->ids[slot], " is in bucket ", i, ", not in ",
                                                  home_of(bucket->hashes[slot])));
                }
            }
            found += bucket->num_used;
            if (bucket->overflow == 0) break;
        }
    }
    if (found != size_) throw std::logic_error(concat("buckets hold ", found, " ids, not ", size_));
}

}  // namespace parrot::scheduler
