#include "scheduler/prefix_symbols.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace parrot::scheduler {

namespace {

// The id at `index` of a segment without variables.
template <size_t kWidth>
uint32_t load(const uint8_t* packed, size_t index) {
    const uint8_t* at = packed + index * kWidth;
    if constexpr (kWidth == 3) return at[0] | uint32_t{at[1]} << 8 | uint32_t{at[2]} << 16;
    if constexpr (kWidth == 2) {
        uint16_t id;
        std::memcpy(&id, at, sizeof(id));
        return id;
    }
    uint32_t id;
    std::memcpy(&id, at, sizeof(id));
    return id;
}

template <size_t kWidth>
void store(uint8_t* packed, size_t index, uint32_t id) {
    uint8_t* at = packed + index * kWidth;
    if constexpr (kWidth == 3) {
        at[0] = static_cast<uint8_t>(id);
        at[1] = static_cast<uint8_t>(id >> 8);
        at[2] = static_cast<uint8_t>(id >> 16);
    } else if constexpr (kWidth == 2) {
        const auto narrow = static_cast<uint16_t>(id);
        std::memcpy(at, &narrow, sizeof(narrow));
    } else {
        std::memcpy(at, &id, sizeof(id));
    }
}

Symbol load_wide(const uint8_t* packed, size_t index) {
    Symbol symbol;
    std::memcpy(&symbol, packed + index * sizeof(symbol), sizeof(symbol));
    return symbol;
}

// No early exit: segments of equal hashes differ next to never, and so the loop is vectorised. A placeholder
// of a variable in `ids`, negative, equals no stored id.
template <size_t kWidth>
bool equals(std::span<const int32_t> ids, const uint8_t* packed) {
    uint32_t difference = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
        difference |= load<kWidth>(packed, i) ^ static_cast<uint32_t>(ids[i]);
    }
    return difference == 0;
}

template <size_t kWidth>
void pack_ids(std::span<const int32_t> ids, uint8_t* packed) {
    for (size_t i = 0; i < ids.size(); ++i) store<kWidth>(packed, i, static_cast<uint32_t>(ids[i]));
}

template <size_t kWidth>
void unpack_ids(const uint8_t* packed, size_t count, std::vector<Symbol>& symbols) {
    for (size_t i = 0; i < count; ++i) symbols.push_back(load<kWidth>(packed, i));
}

}  // namespace

void extend(PrefixHasher& hasher, const PromptView& prompt, size_t begin, size_t end) {
    const auto ids = prompt.token_ids.subspan(begin, end - begin);
    if (prompt.variables.empty()) return hasher.extend(ids);
    size_t run = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] >= 0) continue;
        hasher.extend(ids.subspan(run, i - run));
        hasher.extend_variable(prompt.variables[static_cast<size_t>(~ids[i])]);
        run = i + 1;
    }
    hasher.extend(ids.subspan(run));
}

size_t packed_width(const PromptView& prompt, size_t begin, size_t end) {
    uint32_t bits = 0;
    for (size_t i = begin; i < end; ++i) bits |= static_cast<uint32_t>(prompt.token_ids[i]);
    if (bits >> 31 != 0) return 8;
    return bits >> 16 == 0 ? 2 : bits >> 24 == 0 ? 3 : 4;
}

void pack(const PromptView& prompt, size_t begin, size_t end, size_t width, uint8_t* packed) {
    const auto ids = prompt.token_ids.subspan(begin, end - begin);
    if (width == 2) return pack_ids<2>(ids, packed);
    if (width == 3) return pack_ids<3>(ids, packed);
    if (width == 4) return pack_ids<4>(ids, packed);
    for (size_t i = begin; i < end; ++i) {
        const Symbol symbol = prompt[i];
        std::memcpy(packed + (i - begin) * sizeof(symbol), &symbol, sizeof(symbol));
    }
}

void unpack(const uint8_t* packed, size_t width, size_t count, std::vector<Symbol>& symbols) {
    if (width == 2) return unpack_ids<2>(packed, count, symbols);
    if (width == 3) return unpack_ids<3>(packed, count, symbols);
    if (width == 4) return unpack_ids<4>(packed, count, symbols);
    for (size_t i = 0; i < count; ++i) symbols.push_back(load_wide(packed, i));
}

bool equals_packed(const PromptView& prompt, size_t begin, size_t end, size_t width, const uint8_t* packed) {
    const auto ids = prompt.token_ids.subspan(begin, end - begin);
    if (width == 2) return equals<2>(ids, packed);
    if (width == 3) return equals<3>(ids, packed);
    if (width == 4) return equals<4>(ids, packed);
    for (size_t i = begin; i < end; ++i) {
        if (load_wide(packed, i - begin) != prompt[i]) return false;
    }
    return true;
}

// Four sizes to a doubling, multiples of 16: at most a fifth is lost by rounding up.
SegmentArena::SegmentArena() {
    size_t next = 0;
    for (size_t size = 48; next < pool_of_.size(); size += std::max<size_t>(16, std::bit_floor(size) / 4)) {
        for (; next < pool_of_.size() && (next + 1) * 16 <= size; ++next) {
            pool_of_[next] = static_cast<uint8_t>(pools_.size());
        }
        pools_.emplace_back(size);
    }
}

SegmentArena::Block SegmentArena::allocate(size_t num_bytes) {
    if (num_bytes > kLargestPooled) {
        num_large_bytes_ += num_bytes;
        return {new uint8_t[num_bytes], 0};
    }
    auto& pool = pools_[pool_of_[(num_bytes - 1) / 16]];
    const uint32_t id = pool.allocate();
    return {reinterpret_cast<uint8_t*>(pool.place(id)), id};
}

void SegmentArena::free(const Block& block, size_t num_bytes) {
    if (num_bytes > kLargestPooled) {
        num_large_bytes_ -= num_bytes;
        delete[] block.bytes;
    } else {
        pools_[pool_of_[(num_bytes - 1) / 16]].free(block.id);
    }
}

size_t SegmentArena::num_bytes() const {
    size_t total = num_large_bytes_;
    for (const auto& pool : pools_) total += pool.num_bytes();
    return total;
}

}  // namespace parrot::scheduler
