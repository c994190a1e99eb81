// Binds PrefixIndex of csrc/scheduler.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "core_arrays.h"
#include "scheduler/prefix_index.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace parrot {

using scheduler::PrefixIndex;

void bind_prefix_index(py::module_& module) {
    py::class_<PrefixIndex>(module, "PrefixIndex", "Keyed 128-bit chained hashes of token prefixes.")
        .def(py::init([](const py::bytes& hash_key, bool constant_hash) {
                 return std::make_unique<PrefixIndex>(hash_key_of(hash_key), constant_hash);
             }),
             "hash_key"_a, "constant_hash"_a = false)
        .def(
            "insert",
            [](PrefixIndex& index, int64_t owner, int64_t domain, const py::object& token_ids,
               const py::object& boundaries, int64_t model, int64_t adapter) {
                index.insert(owner, {model, adapter, domain}, int32_view("token_ids", token_ids),
                             int32_view("boundaries", boundaries));
            },
            "owner"_a, "domain"_a, "token_ids"_a, "boundaries"_a, py::kw_only(), "model"_a = 0,
            "adapter"_a = 0)
        .def("remove", &PrefixIndex::remove, "owner"_a)
        .def("shorten", &PrefixIndex::shorten, "owner"_a, "length"_a)
        .def(
            "match",
            [](const PrefixIndex& index, int64_t domain, const py::object& token_ids,
               const py::object& boundaries, int64_t model, int64_t adapter) {
                return index.match({model, adapter, domain}, int32_view("token_ids", token_ids),
                                   int32_view("boundaries", boundaries));
            },
            "domain"_a, "token_ids"_a, "boundaries"_a, py::kw_only(), "model"_a = 0, "adapter"_a = 0)
        .def("__len__", &PrefixIndex::size)
        .def_property_readonly("num_collisions", &PrefixIndex::num_collisions);
}

}  // namespace parrot
