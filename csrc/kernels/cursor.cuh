// Where a warp is in a ring of slots that other warps fill and drain.
#pragma once

#include <cstdint>

namespace parrot {

// A slot, and the parity that it completes.
template <int kSlots>
struct Cursor {
    int slot = 0;
    uint32_t parity = 0;

    __device__ void advance() {
        if (++slot == kSlots) slot = 0, parity ^= 1;
    }
    __device__ Cursor take() {
        const Cursor taken = *this;
        advance();
        return taken;
    }
};

}  // namespace parrot
