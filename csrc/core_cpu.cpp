// Binds what the CPU kernels have in common: instruction set and threads.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <vector>

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

}  // namespace

void bind_cpu(py::module_& module) {
    module.def("cpu_isas", &supported_isas);
    module.def("cpu_isa", [] { return cpu::isa_name(cpu::current_isa()); });
    module.def("set_cpu_isa", &cpu::set_isa, py::arg("isa"));
    module.def("cpu_threads", &cpu::num_threads);
    module.def("set_cpu_threads", &cpu::set_num_threads, py::arg("num_threads"));
    module.def("count_cpu_parts", &count_parts, py::arg("num_parts"), py::arg("repeats") = 1,
               py::call_guard<py::gil_scoped_release>());
}

}  // namespace parrot
