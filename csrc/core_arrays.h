// Arguments that the bindings of csrc/scheduler have in common.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "concat.h"
#include "core_buffers.h"
#include "scheduler/prefix_hash.h"

namespace parrot {

inline scheduler::HashKey hash_key_of(const pybind11::bytes& bytes) {
    const std::string_view view = bytes;
    if (view.size() != sizeof(scheduler::HashKey)) {
        throw std::invalid_argument(concat("hash_key has ", view.size(), " bytes, not 16"));
    }
    scheduler::HashKey key;
    std::memcpy(&key, view.data(), sizeof(key));
    return key;
}

// A one-dimensional C-contiguous int32 array, as it is: nothing is converted or copied.
inline std::span<const int32_t> int32_view(const char* name, const pybind11::object& value) {
    if (!pybind11::isinstance<pybind11::array_t<int32_t>>(value)) {
        const bool is_array = pybind11::isinstance<pybind11::array>(value);
        const auto type =
            is_array ? pybind11::object(value.attr("dtype")) : pybind11::object(pybind11::type::of(value));
        throw std::invalid_argument(
            concat(name, " has type ", std::string(pybind11::str(type)), ", not a numpy array of int32"));
    }
    const auto array = pybind11::reinterpret_borrow<pybind11::array>(value);
    if (array.ndim() != 1 || (array.flags() & pybind11::array::c_style) == 0) {
        throw std::invalid_argument(concat(name, " of shape ",
                                           std::string(pybind11::str(value.attr("shape"))),
                                           " is not one-dimensional and C-contiguous"));
    }
    require_aligned(name, array);
    return {static_cast<const int32_t*>(array.data()), static_cast<size_t>(array.size())};
}

}  // namespace parrot
