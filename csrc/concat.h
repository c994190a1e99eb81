// Text for error messages without <sstream>. An error formatted by a string stream crashed once, with
// Python 3.12 and many other extensions loaded; the suspicion is a second C++ library in the process, whose
// locale a stream then shares. C++17, as CUDA sources are where CMake is older than 3.28.
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
