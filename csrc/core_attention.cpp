// Binds the attention planner of csrc/kvcache.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "kvcache/attention_plan.h"

namespace py = pybind11;

namespace parrot {
namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;

// Copies into a caller-owned buffer that must be large enough, so that a captured graph keeps its addresses.
void fill(const char* name, Int32Array& out, const std::vector<int32_t>& values) {
    if (static_cast<size_t>(out.size()) < values.size()) {
        throw std::invalid_argument(std::string(name) + " has room for " + std::to_string(out.size()) +
                                    " int32, the plan needs " + std::to_string(values.size()));
    }
    std::copy(values.begin(), values.end(), out.mutable_data());
}

py::tuple plan_step(AttentionPlanner& planner, const Int32Array& block_tables, const Int32Array& seq_lens,
                    Int32Array& entries, Int32Array& members, Int32Array& part_begin, int32_t group_size,
                    int32_t num_kv_heads, int32_t num_workers, int32_t block_size, int32_t max_rows,
                    int32_t min_shared_tokens, int32_t min_chunk_tokens, bool share) {
    if (block_tables.ndim() != 2 || seq_lens.ndim() != 1 || block_tables.shape(0) != seq_lens.shape(0)) {
        throw std::invalid_argument("block_tables must be [n, max_blocks] and seq_lens [n]; got " +
                                    std::to_string(block_tables.ndim()) + " axes, " +
                                    std::to_string(block_tables.shape(0)) + " rows and " +
                                    std::to_string(seq_lens.size()) + " lengths");
    }
    const AttentionPlanOptions options{block_size, group_size,        num_kv_heads,     num_workers,
                                       max_rows,   min_shared_tokens, min_chunk_tokens, share};
    const AttentionPlan& result =
        planner.plan({block_tables.data(), static_cast<size_t>(block_tables.size())},
                     {seq_lens.data(), static_cast<size_t>(seq_lens.size())}, options);
    fill("entries", entries, result.entries);
    fill("members", members, result.members);
    fill("part_begin", part_begin, result.part_begin);
    return py::make_tuple(result.entries.size() / 8, result.members.size() / 2,
                          result.part_begin.empty() ? 0 : result.part_begin.back());
}

}  // namespace

void bind_attention_plan(py::module_& module) {
    py::class_<AttentionPlanner>(module, "AttentionPlanner")
        .def(py::init<>())
        .def("plan", &plan_step, py::arg("block_tables").noconvert(), py::arg("seq_lens").noconvert(),
             py::arg("entries").noconvert(), py::arg("members").noconvert(),
             py::arg("part_begin").noconvert(), py::kw_only(), py::arg("group_size"), py::arg("num_kv_heads"),
             py::arg("num_workers"), py::arg("block_size") = 16, py::arg("max_rows") = 64,
             py::arg("min_shared_tokens") = 64, py::arg("min_chunk_tokens") = 128, py::arg("share") = true)
        .def_property_readonly("num_searches", &AttentionPlanner::num_searches);
}

}  // namespace parrot
