// What the bindings ask of numpy arrays before native code reads or writes their memory.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>

#include "concat.h"

namespace parrot {

// Bytes of an argument, for telling whether two of them lie over each other.
struct Extent {
    const char* name;
    uintptr_t begin;
    uintptr_t end;
};

inline Extent extent_of(const char* name, const pybind11::array& array) {
    const auto begin = reinterpret_cast<uintptr_t>(array.data());
    return {name, begin, begin + static_cast<uintptr_t>(array.nbytes())};
}

// What is written must not lie over anything else: ids that were checked would be overwritten before use.
inline void require_apart(const Extent& written, std::initializer_list<Extent> others) {
    for (const Extent& other : others) {
        if (written.begin < other.end && other.begin < written.end) {
            throw std::invalid_argument(concat(written.name, " overlaps ", other.name, ": addresses [",
                                               written.begin, ", ", written.end, ") and [", other.begin, ", ",
                                               other.end, ")"));
        }
    }
}

inline void require_aligned(const char* name, const pybind11::array& array) {
    const auto address = reinterpret_cast<uintptr_t>(array.data());
    if (address % static_cast<uintptr_t>(array.itemsize()) != 0) {
        throw std::invalid_argument(concat(name, ": data is not aligned, address ", address,
                                           " is no multiple of ", array.itemsize(), " bytes"));
    }
}

inline void require_output(const char* name, const pybind11::array& array) {
    require_aligned(name, array);
    if (!array.writeable()) throw std::invalid_argument(concat(name, ": the array is read-only"));
}

}  // namespace parrot
