// What prompts are made of: token ids, and variables that have no value yet; and how the table stores them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "scheduler/chunked.h"
#include "scheduler/prefix_hash.h"

namespace parrot::scheduler {

using VariableId = int64_t;

// A symbol is a token id (>= 0), or ~id of a variable (< 0).
using Symbol = int64_t;

// A prompt as it is passed in: in place of a token id, -1 - i stands for variables[i], one position long
// whatever the variable's text will be.
struct PromptView {
    PromptView(std::span<const int32_t> token_ids, std::span<const VariableId> variables = {})
        : token_ids(token_ids), variables(variables) {}

    size_t size() const { return token_ids.size(); }
    Symbol operator[](size_t index) const {
        const int32_t id = token_ids[index];
        return id >= 0 ? Symbol{id} : ~variables[static_cast<size_t>(~id)];
    }

    std::span<const int32_t> token_ids;
    std::span<const VariableId> variables;
};

// Extends a hash by the symbols [begin, end) of a prompt.
void extend(PrefixHasher& hasher, const PromptView& prompt, size_t begin, size_t end);

// Symbols are packed to the bytes that the largest of a segment needs: 2, 3 or 4, or 8 for one with
// variables.
size_t packed_width(const PromptView& prompt, size_t begin, size_t end);
void pack(const PromptView& prompt, size_t begin, size_t end, size_t width, uint8_t* packed);
void unpack(const uint8_t* packed, size_t width, size_t count, std::vector<Symbol>& symbols);
bool equals_packed(const PromptView& prompt, size_t begin, size_t end, size_t width, const uint8_t* packed);

// Memory of packed segments. Blocks of some twenty sizes come from pools, larger ones from the system: the
// general allocator, which joins what was freed when it sees fit, stopped for seconds over millions of
// blocks.
class SegmentArena {
  public:
    struct Block {
        uint8_t* bytes;
        uint32_t id;
    };

    SegmentArena();

    Block allocate(size_t num_bytes);
    // The number of bytes asked for.
    void free(const Block& block, size_t num_bytes);

    // Of the pools, and of larger blocks.
    size_t num_bytes() const;

  private:
    static constexpr size_t kLargestPooled = 1024;
    static constexpr uint32_t kPoolWords = 64;

    std::vector<RawPool<kPoolWords>> pools_;
    std::array<uint8_t, kLargestPooled / 16> pool_of_{};  // by bytes / 16, rounded up, - 1
    size_t num_large_bytes_ = 0;
};

}  // namespace parrot::scheduler
