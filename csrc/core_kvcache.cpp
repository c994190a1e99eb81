// Binds csrc/kvcache. Every array is checked here, before the tree sees it: type, shape, layout.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "core_buffers.h"
#include "core_types.h"
#include "kvcache/context_tree.h"

namespace py = pybind11;

namespace parrot {

namespace {

using kvcache::ContextTree;
using kvcache::require;

template <class T>
T* checked_data(const py::object& object, const char* name, py::ssize_t num_dimensions) {
    using Exact = py::array_t<T, py::array::c_style>;
    const bool is_array = py::isinstance<py::array>(object);
    const bool fits = py::isinstance<Exact>(object) && py::cast<py::array>(object).ndim() == num_dimensions;
    if (!fits) {
        const std::string got =
            is_array ? py::str("dtype {}, shape {}, strides {}")
                           .format(object.attr("dtype"), object.attr("shape"), object.attr("strides"))
                           .template cast<std::string>()
                     : std::string(py::str(py::type::of(object)));
        require(false, name, ": expected a C-contiguous array, dtype ",
                py::str(py::dtype::of<T>()).template cast<std::string>(), ", ", num_dimensions,
                " dimension(s); got ", got);
    }
    const auto array = py::cast<py::array>(object);
    require_aligned(name, array);
    return const_cast<T*>(static_cast<const T*>(array.data()));
}

template <class T>
std::span<const T> input(const py::object& object, const char* name) {
    const T* data = checked_data<T>(object, name, 1);
    return {data, static_cast<std::size_t>(py::len(object))};
}

std::span<std::int32_t> output(const py::object& object, const char* name, py::ssize_t num_dimensions) {
    std::int32_t* data = checked_data<std::int32_t>(object, name, num_dimensions);
    const auto array = py::cast<py::array>(object);
    require_output(name, array);
    return {data, static_cast<std::size_t>(array.size())};
}

template <class T>
Extent extent_of(const char* name, std::span<T> values) {
    const auto begin = reinterpret_cast<std::uintptr_t>(values.data());
    return {name, begin, begin + values.size_bytes()};
}

py::array_t<std::int32_t> to_array(const std::vector<std::int32_t>& values) {
    return py::array_t<std::int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

py::array_t<std::int32_t> reserve(ContextTree& tree, const py::object& context_ids, const py::object& counts,
                                  const py::object& token_ids, const py::object& slots) {
    const auto ids = input<std::int64_t>(context_ids, "context_ids");
    const auto per_context = input<std::int32_t>(counts, "counts");
    const auto tokens = input<std::int32_t>(token_ids, "token_ids");
    const auto out = output(slots, "slots", 1);
    require_apart(extent_of("slots", out), {extent_of("context_ids", ids), extent_of("counts", per_context),
                                            extent_of("token_ids", tokens)});
    const std::vector<kvcache::BlockCopy> copies = tree.reserve(ids, per_context, tokens, out);
    py::array_t<std::int32_t> rows({static_cast<py::ssize_t>(copies.size()), py::ssize_t{3}});
    std::int32_t* cell = rows.mutable_data();
    for (const kvcache::BlockCopy& copy : copies) {
        *cell++ = copy.source;
        *cell++ = copy.destination;
        *cell++ = copy.num_slots;
    }
    return rows;
}

void block_tables(const ContextTree& tree, const py::object& context_ids, const py::object& out) {
    const auto rows = output(out, "out", 2);
    const auto max_blocks = static_cast<std::size_t>(py::cast<py::array>(out).shape(1));
    const auto ids = input<std::int64_t>(context_ids, "context_ids");
    require_apart(extent_of("out", rows), {extent_of("context_ids", ids)});
    tree.block_tables(ids, rows, max_blocks);
}

void lengths(const ContextTree& tree, const py::object& context_ids, const py::object& out) {
    const auto ids = input<std::int64_t>(context_ids, "context_ids");
    const auto values = output(out, "out", 1);
    require_apart(extent_of("out", values), {extent_of("context_ids", ids)});
    tree.lengths(ids, values);
}

py::dict counters(const ContextTree& tree) {
    py::dict values;
    values["matched_tokens"] = tree.counters().matched_tokens;
    values["forks"] = tree.counters().forks;
    values["cow_copies"] = tree.counters().cow_copies;
    values["evicted_blocks"] = tree.tree().num_evicted_blocks();
    return values;
}

void bind_errors(py::module_& module) {
    py::register_exception<kvcache::OutOfBlocks>(module, "OutOfBlocks", PyExc_RuntimeError);
    py::register_local_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const kvcache::UnknownContext& unknown) {
            py::set_error(PyExc_KeyError, unknown.what());
        }
    });
}

void bind_verbs(py::class_<ContextTree>& tree) {
    tree.def(
            "open",
            [](ContextTree& self, std::int64_t context_id, std::int64_t domain, const py::object& token_ids,
               std::int64_t max_prefix, std::int64_t public_len) {
                return self.open(context_id, domain, input<std::int32_t>(token_ids, "token_ids"), max_prefix,
                                 public_len);
            },
            py::arg("context_id"), py::arg("domain"), py::arg("token_ids"), py::arg("max_prefix"),
            py::arg("public_len") = 0)
        .def("fork", &ContextTree::fork, py::arg("context_id"), py::arg("parent_context_id"),
             py::arg("length"))
        .def(
            "pending_prefix",
            [](const ContextTree& self, std::int64_t domain, const py::object& token_ids,
               std::int64_t public_len) {
                return self.pending_prefix(domain, input<std::int32_t>(token_ids, "token_ids"), public_len);
            },
            py::arg("domain"), py::arg("token_ids"), py::arg("public_len") = 0)
        .def("reserve", &reserve, py::arg("context_ids"), py::arg("counts"), py::arg("token_ids"),
             py::arg("slots"))
        .def(
            "commit",
            [](ContextTree& self, const py::object& context_ids) {
                self.commit(input<std::int64_t>(context_ids, "context_ids"));
            },
            py::arg("context_ids"))
        .def(
            "set_last_tokens",
            [](ContextTree& self, const py::object& context_ids, const py::object& token_ids) {
                self.set_last_tokens(input<std::int64_t>(context_ids, "context_ids"),
                                     input<std::int32_t>(token_ids, "token_ids"));
            },
            py::arg("context_ids"), py::arg("token_ids"))
        .def(
            "rollback",
            [](ContextTree& self, const py::object& context_ids) {
                self.rollback(input<std::int64_t>(context_ids, "context_ids"));
            },
            py::arg("context_ids"))
        .def("truncate", &ContextTree::truncate, py::arg("context_id"), py::arg("length"))
        .def("release", &ContextTree::release, py::arg("context_id"))
        .def("free", &ContextTree::free, py::arg("context_id"))
        .def(
            "set_uses",
            [](ContextTree& self, const py::object& context_ids, const py::object& prefix_lengths,
               const py::object& remaining_uses, const py::object& steps_to_next_use) {
                self.set_uses(input<std::int64_t>(context_ids, "context_ids"),
                              input<std::int32_t>(prefix_lengths, "prefix_lengths"),
                              input<std::int32_t>(remaining_uses, "remaining_uses"),
                              input<std::int32_t>(steps_to_next_use, "steps_to_next_use"));
            },
            py::arg("context_ids"), py::arg("prefix_lengths"), py::arg("remaining_uses"),
            py::arg("steps_to_next_use"))
        .def("clear_cache", &ContextTree::clear_cache)
        .def("reset", &ContextTree::reset);
}

void bind_views(py::class_<ContextTree>& tree) {
    tree.def("lengths", &lengths, py::arg("context_ids"), py::arg("out"))
        .def(
            "num_distinct_tokens",
            [](const ContextTree& self, const py::object& context_ids) {
                return self.num_distinct_tokens(input<std::int64_t>(context_ids, "context_ids"));
            },
            py::arg("context_ids"))
        .def("block_tables", &block_tables, py::arg("context_ids"), py::arg("out"))
        .def("take_evicted", &ContextTree::take_evicted)
        .def(
            "tokens", [](const ContextTree& self, std::int64_t id) { return to_array(self.tokens(id)); },
            py::arg("context_id"))
        .def("check_invariants", &ContextTree::check_invariants)
        .def("counters", &counters)
        .def_property_readonly("num_free_blocks",
                               [](const ContextTree& self) { return self.tree().num_free_blocks(); })
        .def_property_readonly("num_evictable_blocks",
                               [](const ContextTree& self) { return self.tree().num_evictable_blocks(); })
        .def_property_readonly("num_held_blocks",
                               [](const ContextTree& self) { return self.tree().num_held_blocks(); })
        .def_property_readonly("num_blocks",
                               [](const ContextTree& self) { return self.tree().num_blocks(); });
}

}  // namespace

void bind_kvcache(py::module_& module) {
    bind_errors(module);
    auto tree = bind_class<ContextTree>(module, "ContextTree");
    tree.def(py::init<std::int64_t, std::int64_t>(), py::arg("num_blocks"), py::arg("block_size") = 16);
    bind_verbs(tree);
    bind_views(tree);
}

}  // namespace parrot
