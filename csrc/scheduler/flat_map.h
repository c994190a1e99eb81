// A hash map in one array: open addressing with linear probing, and no memory per entry. For keys and values
// that are cheap to copy. The order of entries shows nowhere, so that it cannot reach a decision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace parrot::scheduler {

// A permutation of 64 bits that leaves nothing of the order of its arguments.
inline uint64_t mixed(uint64_t value) {
    value += 0x9e3779b97f4a7c15ULL;
    value ^= value >> 32;
    value *= 0x9e3779b97f4a7c15ULL;
    value ^= value >> 29;
    value *= 0xbf58476d1ce4e5b9ULL;
    return value ^ value >> 32;
}

struct MixedHash {
    uint64_t operator()(uint64_t key) const { return mixed(key); }
    uint64_t operator()(int64_t key) const { return mixed(static_cast<uint64_t>(key)); }
};

template <class Key, class Value, class Hash = MixedHash>
class FlatMap {
  public:
    // The value stays where it is until the next insert or erase.
    Value* find(const Key& key) {
        if (slots_.empty()) return nullptr;
        Slot& slot = slots_[position(key)];
        return slot.used ? &slot.value : nullptr;
    }
    const Value* find(const Key& key) const { return const_cast<FlatMap*>(this)->find(key); }

    // The value of the key, and whether it is new.
    std::pair<Value*, bool> insert(const Key& key, const Value& value) {
        if (size_ * 4 >= slots_.size() * 3) grow();
        Slot& slot = slots_[position(key)];
        const bool is_new = !slot.used;
        if (is_new) {
            slot = {key, value, true};
            ++size_;
        }
        return {&slot.value, is_new};
    }

    bool erase(const Key& key) {
        if (slots_.empty()) return false;
        size_t hole = position(key);
        if (!slots_[hole].used) return false;
        --size_;
        for (size_t next = after(hole); slots_[next].used; next = after(next)) {
            const size_t home = home_of(slots_[next].key);
            const bool stays = ((next - home) & mask()) < ((next - hole) & mask());
            if (stays) continue;
            slots_[hole] = slots_[next];
            hole = next;
        }
        slots_[hole].used = false;
        return true;
    }

    void clear() {
        if (size_ == 0) return;
        slots_.assign(slots_.size(), Slot{});
        size_ = 0;
    }

    size_t size() const { return size_; }

    template <class Visit>
    void for_each(Visit visit) const {
        for (const Slot& slot : slots_) {
            if (slot.used) visit(slot.key, slot.value);
        }
    }

  private:
    struct Slot {
        Key key{};
        Value value{};
        bool used = false;
    };

    size_t mask() const { return slots_.size() - 1; }
    size_t after(size_t position) const { return (position + 1) & mask(); }
    size_t home_of(const Key& key) const { return Hash{}(key)&mask(); }

    // Where the key is, or would go.
    size_t position(const Key& key) const {
        size_t at = home_of(key);
        while (slots_[at].used && !(slots_[at].key == key)) at = after(at);
        return at;
    }

    void grow() {
        std::vector<Slot> old(slots_.empty() ? 16 : slots_.size() * 2);
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.used) slots_[position(slot.key)] = slot;
        }
    }

    std::vector<Slot> slots_;  // a power of two of them
    size_t size_ = 0;
};

}  // namespace parrot::scheduler
