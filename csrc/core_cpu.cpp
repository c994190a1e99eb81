// Binds what the CPU kernels have in common: instruction set and threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <vector>

#include "concat.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/parallel.h"

namespace py = pybind11;

namespace parrot {
namespace {

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
    if (num_parts < 0 || repeats < 0) {
        throw std::invalid_argument("num_parts and repeats must not be negative");
    }
    std::vector<std::atomic<int>> counts(static_cast<size_t>(num_parts));
    for (int i = 0; i < repeats; ++i) {
        cpu::parallel(num_parts, [&](int part) { counts[static_cast<size_t>(part)]++; });
    }
    return {counts.begin(), counts.end()};
}

// Reads `size` bytes on `num_threads` threads and returns what their words add up to: for measuring how fast
// this machine reads.
uint64_t sum_words(uintptr_t address, uint64_t size, int num_threads) {
    if (address % 64 != 0 || size % 64 != 0 || num_threads < 1) {
        throw std::invalid_argument(concat("address = ", address, " and size = ", size,
                                           " must be multiples of 64, num_threads = ", num_threads,
                                           " positive"));
    }
    std::atomic<uint64_t> total{0};
    cpu::parallel(num_threads, [&](int part) {
        const cpu::Slice lines = cpu::slice_of(static_cast<int64_t>(size / 64), part, num_threads);
        const auto* words = reinterpret_cast<const uint64_t*>(address);
        uint64_t sums[8] = {};
        for (int64_t i = 8 * lines.begin; i < 8 * lines.end; i += 8) {
            for (int j = 0; j < 8; ++j) sums[j] += words[i + j];
        }
        for (const uint64_t sum : sums) total += sum;
    });
    return total;
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
    module.def("sum_cpu_words", &sum_words, py::arg("address"), py::arg("size"), py::arg("num_threads"),
               py::call_guard<py::gil_scoped_release>());
}

}  // namespace parrot
