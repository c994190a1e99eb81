// Errors of the KV cache. Wrong arguments are std::invalid_argument.
#pragma once

#include <stdexcept>

#include "concat.h"

namespace parrot::kvcache {

/// The pool has too few free and evictable blocks for a reservation; nothing was changed.
class OutOfBlocks : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// No context has this id.
class UnknownContext : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) throw std::invalid_argument(concat(parts...));
}

}  // namespace parrot::kvcache
