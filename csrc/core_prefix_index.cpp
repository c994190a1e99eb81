// Binds PrefixIndex of csrc/scheduler.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <vector>

#include "core_arrays.h"
#include "core_types.h"
#include "scheduler/errors.h"
#include "scheduler/prefix_index.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace parrot {

namespace {

using scheduler::OwnerKind;
using scheduler::PrefixIndex;
using scheduler::PromptView;

void add_call(PrefixIndex& index, int64_t call_id, int64_t domain, const py::object& token_ids,
              const py::object& boundaries, const std::vector<int64_t>& variables, int64_t model,
              int64_t adapter, int32_t public_len) {
    index.insert(OwnerKind::kCall, call_id, {model, adapter, domain, public_len},
                 PromptView(int32_view("token_ids", token_ids), variables),
                 int32_view("boundaries", boundaries));
}

void add_context(PrefixIndex& index, int64_t context_id, int64_t domain, const py::object& token_ids,
                 const py::object& boundaries, int64_t model, int64_t adapter, int32_t public_len) {
    index.insert(OwnerKind::kContext, context_id, {model, adapter, domain, public_len},
                 int32_view("token_ids", token_ids), int32_view("boundaries", boundaries));
}

py::list match(const PrefixIndex& index, int64_t domain, const py::object& token_ids,
               const py::object& boundaries, const std::vector<int64_t>& variables, int64_t model,
               int64_t adapter, int32_t public_len, int64_t max_owners) {
    scheduler::require_at_least("max_owners", max_owners, 1);
    const PromptView prompt(int32_view("token_ids", token_ids), variables);
    // A copy: making lists may run Python's collector, and that any code, which may match again.
    const auto matches = index.match({model, adapter, domain, public_len}, prompt,
                                     int32_view("boundaries", boundaries), static_cast<size_t>(max_owners));
    py::list rows;
    size_t call = 0, context = 0;
    for (const auto& row : matches.rows) {
        py::list calls, contexts;
        for (; call < row.calls_end; ++call) calls.append(matches.calls[call]);
        for (; context < row.contexts_end; ++context) contexts.append(matches.contexts[context]);
        rows.append(py::make_tuple(row.boundary, calls, contexts));
    }
    return rows;
}

}  // namespace

void bind_prefix_index(py::module_& module) {
    const std::vector<int64_t> none;
    bind_class<PrefixIndex>(module, "PrefixIndex", "Who has which token prefix.")
        .def(py::init([](const py::bytes& hash_key, bool constant_hash) {
                 return std::make_unique<PrefixIndex>(hash_key_of(hash_key), constant_hash);
             }),
             "hash_key"_a, py::arg("constant_hash").noconvert() = false)
        .def("add_call", &add_call, "call_id"_a, "domain"_a, "token_ids"_a, "boundaries"_a, py::kw_only(),
             "variables"_a = none, "model"_a = 0, "adapter"_a = 0, "public_len"_a = 0)
        .def("add_context", &add_context, "context_id"_a, "domain"_a, "token_ids"_a, "boundaries"_a,
             py::kw_only(), "model"_a = 0, "adapter"_a = 0, "public_len"_a = 0)
        .def(
            "remove_call", [](PrefixIndex& index, int64_t id) { index.remove(OwnerKind::kCall, id); },
            "call_id"_a)
        .def(
            "remove_context", [](PrefixIndex& index, int64_t id) { index.remove(OwnerKind::kContext, id); },
            "context_id"_a)
        .def("shorten_context", &PrefixIndex::shorten_context, "context_id"_a, "length"_a)
        .def(
            "set_variable",
            [](PrefixIndex& index, int64_t variable, const py::object& token_ids) {
                return index.set_variable(variable, int32_view("token_ids", token_ids));
            },
            "variable_id"_a, "token_ids"_a)
        .def("match", &match, "domain"_a, "token_ids"_a, "boundaries"_a, py::kw_only(), "variables"_a = none,
             "model"_a = 0, "adapter"_a = 0, "public_len"_a = 0, "max_owners"_a = 16)
        .def("__len__", &PrefixIndex::size)
        .def("check_invariants", &PrefixIndex::check_invariants)
        .def_property_readonly("num_bytes", &PrefixIndex::num_bytes)
        .def_property_readonly("num_collisions", &PrefixIndex::num_collisions);
}

}  // namespace parrot
