// Binds what the CPU kernels have in common: instruction set and threads.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <vector>

#include "concat.h"
#include "core_buffers.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"

namespace py = pybind11;

namespace parrot {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxParts = 1 << 16;
constexpr int kMaxRepeats = 1 << 24;

void require_within(const char* name, int value, int low, int high) {
    if (value < low || value > high) {
        throw std::invalid_argument(concat(name, " = ", value, " is outside [", low, ", ", high, "]"));
    }
}

std::vector<std::string> supported_isas() {
    std::vector<std::string> names;
    for (int i = 0; i <= static_cast<int>(cpu::detected_isa()); ++i) {
        names.emplace_back(cpu::isa_name(static_cast<cpu::Isa>(i)));
    }
    return names;
}

// How often each part of a region of `num_parts` ran, over `repeats` regions: for tests and for timing a
// region that does nothing.
std::vector<int> count_parts(int num_parts, int repeats) {
    require_within("num_parts", num_parts, 0, kMaxParts);
    require_within("repeats", repeats, 0, kMaxRepeats);
    std::vector<std::atomic<int>> counts(static_cast<size_t>(num_parts));
    for (int i = 0; i < repeats; ++i) {
        cpu::parallel(num_parts, [&](int part) { counts[static_cast<size_t>(part)]++; });
    }
    return {counts.begin(), counts.end()};
}

// What the words add up to, read on `num_threads` threads: for measuring how fast this machine reads.
int64_t sum_words(const py::object& values, int num_threads) {
    if (!py::isinstance<py::array_t<int64_t, py::array::c_style>>(values)) {
        const bool is_array = py::isinstance<py::array>(values);
        const auto kind = is_array ? py::object(values.attr("dtype")) : py::object(py::type::of(values));
        throw std::invalid_argument(concat("words = ", is_array ? "array of " : "",
                                           std::string(py::str(kind)),
                                           ", expected a C-contiguous numpy array of int64"));
    }
    require_within("num_threads", num_threads, 1, kMaxThreads);
    const auto array = py::reinterpret_borrow<py::array_t<int64_t>>(values);
    require_aligned("words", array);
    const int64_t* words = array.data();
    const auto size = static_cast<int64_t>(array.size());
    const py::gil_scoped_release release;
    std::atomic<uint64_t> total{0};
    cpu::parallel(num_threads, [&](int part) {
        const cpu::Slice slice = cpu::slice_of(size, part, num_threads);
        uint64_t sum = 0;
        for (int64_t i = slice.begin; i < slice.end; ++i) sum += static_cast<uint64_t>(words[i]);
        total += sum;
    });
    return static_cast<int64_t>(total.load());
}

}  // namespace

void bind_cpu(py::module_& module) {
    module.def("cpu_isas", &supported_isas);
    module.def("cpu_isa", [] { return cpu::isa_name(cpu::current_isa()); });
    module.def("set_cpu_isa", &cpu::set_isa, py::arg("isa"));
    module.def("cpu_threads", &cpu::num_threads);
    module.def("set_cpu_threads", &cpu::set_num_threads, py::arg("num_threads"));
    module.def("count_cpu_parts", &count_parts, py::arg("num_parts"), py::arg("repeats") = 1,
               py::call_guard<py::gil_scoped_release>());
    module.def("sum_cpu_words", &sum_words, py::arg("words"), py::arg("num_threads"));
}

}  // namespace parrot
