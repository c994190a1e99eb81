// Text for error messages without <sstream>: a process may hold a second C++ library, bundled by another
// extension, and stream constructors have crashed there on the locale that the two do not share. C++17, as
// CUDA sources are where CMake is older than 3.28.
#pragma once

#include <string>
#include <type_traits>

namespace parrot {

template <class Part>
void append(std::string& text, const Part& part) {
    if constexpr (std::is_arithmetic_v<Part>) {
        text += std::to_string(part);
    } else {
        text += part;
    }
}

// The parts one after the other; numbers in decimal.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    (append(text, parts), ...);
    return text;
}

}  // namespace parrot
