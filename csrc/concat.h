// Text for error messages without <sstream>: a process may hold a second C++ library, bundled by another
// extension, and stream constructors have crashed there on the locale that the two do not share.
#pragma once

#include <concepts>
#include <string>
#include <string_view>

namespace parrot {

inline void append(std::string& text, std::string_view part) { text += part; }
template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
void append(std::string& text, Number part) {
    text += std::to_string(part);
}

// The parts one after the other; numbers in decimal.
template <class... Parts>
std::string concat(const Parts&... parts) {
    std::string text;
    (append(text, parts), ...);
    return text;
}

}  // namespace parrot
