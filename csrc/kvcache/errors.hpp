// Errors of the KV cache. Wrong arguments are std::invalid_argument.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

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
std::string message(const Parts&... parts) {
    std::ostringstream text;
    (text << ... << parts);
    return text.str();
}

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) throw std::invalid_argument(message(parts...));
}

}  // namespace parrot::kvcache
