// Binds the attention planner of csrc/kvcache.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "concat.h"
#include "core_buffers.h"
#include "core_types.h"
#include "kvcache/attention_plan.h"

namespace py = pybind11;

namespace parrot {
namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;

// Copies into a caller-owned buffer, which is large enough, so that a captured graph keeps its addresses.
void fill(Int32Array& out, const std::vector<int32_t>& values) {
    std::copy(values.begin(), values.end(), out.mutable_data());
}

// How many items of `size` int32 a buffer holds.
int32_t room(const Int32Array& buffer, py::ssize_t size) {
    return static_cast<int32_t>(
        std::min<py::ssize_t>(buffer.size() / size, std::numeric_limits<int32_t>::max()));
}

void require_positive(const char* name, int32_t value) {
    if (value < 1) throw std::invalid_argument(concat(name, " = ", value, " is not positive"));
}

void check(const AttentionPlanOptions& options) {
    require_positive("block_size", options.block_size);
    require_positive("group_size", options.group_size);
    require_positive("num_kv_heads", options.num_kv_heads);
    require_positive("num_workers", options.num_workers);
    require_positive("min_shared_tokens", options.min_shared_tokens);
    require_positive("min_chunk_tokens", options.min_chunk_tokens);
    if (options.max_rows < options.group_size) {
        throw std::invalid_argument(
            concat("max_rows = ", options.max_rows, " is below group_size = ", options.group_size));
    }
}

void check(const Int32Array& block_tables, const Int32Array& seq_lens, const Int32Array& entries,
           const Int32Array& members, const Int32Array& part_begin) {
    if (block_tables.ndim() != 2 || seq_lens.ndim() != 1 || block_tables.shape(0) != seq_lens.shape(0)) {
        throw std::invalid_argument(concat(
            "block_tables must be [n, max_blocks] and seq_lens [n]; got ", block_tables.ndim(), " axes, ",
            block_tables.ndim() == 0 ? 1 : block_tables.shape(0), " rows and ", seq_lens.size(), " lengths"));
    }
    if (part_begin.size() < seq_lens.size() + 1) {
        throw std::invalid_argument(concat("part_begin has room for ", part_begin.size(),
                                           " int32, the plan needs ", seq_lens.size() + 1));
    }
    require_aligned("block_tables", block_tables);
    require_aligned("seq_lens", seq_lens);
    require_output("entries", entries);
    require_output("members", members);
    require_output("part_begin", part_begin);
    const Extent tables = extent_of("block_tables", block_tables), lengths = extent_of("seq_lens", seq_lens);
    const Extent first = extent_of("entries", entries), second = extent_of("members", members);
    const Extent third = extent_of("part_begin", part_begin);
    require_apart(first, {tables, lengths, second, third});
    require_apart(second, {tables, lengths, third});
    require_apart(third, {tables, lengths});
}

py::tuple plan_step(AttentionPlanner& planner, const Int32Array& block_tables, const Int32Array& seq_lens,
                    Int32Array& entries, Int32Array& members, Int32Array& part_begin, int32_t group_size,
                    int32_t num_kv_heads, int32_t num_workers, int32_t block_size, int32_t max_rows,
                    int32_t min_shared_tokens, int32_t min_chunk_tokens, bool share, int32_t entry_tokens,
                    int32_t own_entry_tokens, int32_t row_tokens) {
    check(block_tables, seq_lens, entries, members, part_begin);
    const AttentionPlanOptions options{block_size,      group_size,        num_kv_heads,     num_workers,
                                       max_rows,        min_shared_tokens, min_chunk_tokens, share,
                                       entry_tokens,    own_entry_tokens,  row_tokens,       room(entries, 8),
                                       room(members, 2)};
    check(options);
    const AttentionPlan& result =
        planner.plan({block_tables.data(), static_cast<size_t>(block_tables.size())},
                     {seq_lens.data(), static_cast<size_t>(seq_lens.size())}, options);
    fill(entries, result.entries);
    fill(members, result.members);
    fill(part_begin, result.part_begin);
    return py::make_tuple(result.entries.size() / 8, result.members.size() / 2,
                          result.part_begin.empty() ? 0 : result.part_begin.back());
}

}  // namespace

void bind_attention_plan(py::module_& module) {
    const AttentionPlanOptions defaults;
    bind_class<AttentionPlanner>(module, "AttentionPlanner")
        .def(py::init<>())
        .def("plan", &plan_step, py::arg("block_tables").noconvert(), py::arg("seq_lens").noconvert(),
             py::arg("entries").noconvert(), py::arg("members").noconvert(),
             py::arg("part_begin").noconvert(), py::kw_only(), py::arg("group_size"), py::arg("num_kv_heads"),
             py::arg("num_workers"), py::arg("block_size") = 16, py::arg("max_rows") = 64,
             py::arg("min_shared_tokens") = 64, py::arg("min_chunk_tokens") = 128,
             py::arg("share").noconvert() = true, py::arg("entry_tokens") = defaults.entry_tokens,
             py::arg("own_entry_tokens") = defaults.own_entry_tokens,
             py::arg("row_tokens") = defaults.row_tokens)
        .def_property_readonly("num_searches", &AttentionPlanner::num_searches)
        .def_property_readonly("max_block", &AttentionPlanner::max_block)
        .def_property_readonly("num_sharing", &AttentionPlanner::num_sharing);
}

}  // namespace parrot
