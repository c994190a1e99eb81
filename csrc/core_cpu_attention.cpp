// Binds the CPU attention of csrc/kernels/cpu: tensors come as TensorView.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "concat.h"
#include "core_buffers.h"
#include "core_types.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/parallel.h"

namespace py = pybind11;

namespace parrot {
namespace {

using Int32Array = py::array_t<int32_t, py::array::c_style>;
using Shape = std::vector<int64_t>;

// A caller's tensor. An object that Python keeps, since a tuple would be converted at every call.
struct TensorView {
    uintptr_t address;
    Shape shape;
    Shape strides;  // in elements
};

// A shape or strides in a message: formatted only when there is one. Each call checks some thirty of them.
struct Text {
    const Shape& values;

    operator std::string() const {
        std::string result = "[";
        for (size_t i = 0; i < values.size(); ++i) result += concat(i == 0 ? "" : ", ", values[i]);
        return result + "]";
    }
};

template <class... Parts>
void require(bool condition, const Parts&... parts) {
    if (!condition) throw std::invalid_argument(concat(parts...));
}

std::span<const int32_t> view_of(const char* name, const Int32Array& array, py::ssize_t axes) {
    require(array.ndim() == axes, name, " has ", array.ndim(), " axes, expected ", axes);
    require_aligned(name, array);
    return {array.data(), static_cast<size_t>(array.size())};
}

cpu::KvType type_of(const std::string& dtype) {
    if (dtype == "float32") return cpu::KvType::kFloat32;
    require(dtype == "bfloat16", "dtype = \"", dtype, "\" is neither float32 nor bfloat16");
    return cpu::KvType::kBfloat16;
}

// The address of a tensor of `shape` whose axes from `first_dense` on are contiguous.
void* checked(const char* name, const TensorView& tensor, const Shape& shape, size_t first_dense,
              uintptr_t element_size) {
    const auto& [address, given, strides] = tensor;
    require(given == shape, name, " has shape ", Text{given}, ", expected ", Text{shape});
    require(strides.size() == shape.size(), name, " has ", strides.size(), " strides for ", shape.size(),
            " axes");
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    if (elements == 0) return nullptr;
    int64_t dense = 1;
    for (size_t axis = shape.size(); axis-- > 0;) {
        const bool fits = axis >= first_dense ? strides[axis] == dense : strides[axis] >= dense;
        require(fits || shape[axis] == 1, name, " has strides ", Text{strides}, ": that of axis ", axis,
                " is ", strides[axis], ", expected ", axis >= first_dense ? "" : "at least ", dense);
        dense *= shape[axis];
    }
    require(address != 0, name, " has address 0");
    require(address % element_size == 0, name, " has address ", address, ", no multiple of its elements' ",
            element_size, " bytes");
    return reinterpret_cast<void*>(address);
}

// The bytes that a tensor of checked shape and strides reaches.
Extent extent_of(const char* name, const TensorView& tensor, uintptr_t element_size) {
    __extension__ using Wide = __int128;
    Wide last = 0;
    for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
        if (tensor.shape[axis] == 0) return {name, 0, 0};
        last += Wide{tensor.shape[axis] - 1} * tensor.strides[axis];
    }
    const Wide end = Wide{tensor.address} + (last + 1) * Wide{element_size};
    require(end <= Wide{std::numeric_limits<int64_t>::max()}, name, " of address ", tensor.address,
            ", shape ", Text{tensor.shape}, " and strides ", Text{tensor.strides},
            " ends beyond the address space");
    return {name, tensor.address, static_cast<uintptr_t>(end)};
}

// The output may be the query itself, row by row; a row's query is read before its output is written.
void check_output(const TensorView& query, const TensorView& k_cache, const TensorView& v_cache,
                  const TensorView& out, uintptr_t element_size) {
    const Extent written = extent_of("out", out, element_size);
    const Extent read = extent_of("query", query, element_size);
    require_apart(written,
                  {extent_of("k_cache", k_cache, element_size), extent_of("v_cache", v_cache, element_size)});
    const bool is_same = query.address == out.address && query.strides == out.strides;
    if (!is_same) require_apart(written, {read});
}

std::unique_ptr<cpu::PagedAttention> make(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim,
                                          const std::string& dtype) {
    return std::make_unique<cpu::PagedAttention>(cpu::AttentionShape{num_heads, num_kv_heads, head_dim},
                                                 type_of(dtype));
}

void plan(cpu::PagedAttention& attention, const Int32Array& query_start, const Int32Array& seq_lens,
          const Int32Array& block_tables, int32_t num_blocks, int num_threads, bool share,
          int32_t min_shared_tokens) {
    cpu::AttentionStep step;
    step.query_start = view_of("query_start", query_start, 1);
    step.seq_lens = view_of("seq_lens", seq_lens, 1);
    step.block_tables = view_of("block_tables", block_tables, 2);
    require(block_tables.shape(0) == seq_lens.shape(0), "block_tables has ", block_tables.shape(0),
            " rows for ", seq_lens.shape(0), " sequences");
    step.max_blocks = static_cast<int32_t>(block_tables.shape(1));
    step.num_blocks = num_blocks;
    require(num_blocks >= 1, "num_blocks = ", num_blocks, " is less than 1");
    require(num_threads >= 0 && num_threads <= 1024, "num_threads = ", num_threads, " is outside [0, 1024]");
    const auto claim = attention.claim();
    const cpu::AttentionOptions options{num_threads == 0 ? cpu::num_threads() : num_threads, share,
                                        min_shared_tokens};
    const py::gil_scoped_release release;
    attention.plan(step, options);
}

void run(cpu::PagedAttention& attention, const TensorView& query, const TensorView& k_cache,
         const TensorView& v_cache, const TensorView& out, double scale) {
    const auto claim = attention.claim();  // or the plan might change between checks and use
    attention.check_planned();
    const cpu::AttentionShape& shape = attention.shape();
    const uintptr_t size = attention.type() == cpu::KvType::kFloat32 ? 4 : 2;
    const Shape rows{attention.num_rows(), shape.num_heads, shape.head_dim};
    const Shape cache{attention.num_blocks(), cpu::kBlockTokens, shape.num_kv_heads, shape.head_dim};
    cpu::AttentionCall call{};
    call.query = checked("query", query, rows, 1, size);
    call.keys = checked("k_cache", k_cache, cache, 0, size);
    call.values = checked("v_cache", v_cache, cache, 0, size);
    call.output = checked("out", out, rows, 1, size);
    check_output(query, k_cache, v_cache, out, size);
    call.query_stride = query.strides[0];
    call.output_stride = out.strides[0];
    call.scale = static_cast<float>(scale);
    require(std::isfinite(call.scale) && call.scale > 0, "scale = ", scale, " is not positive and finite");
    const py::gil_scoped_release release;
    attention.run(call);
}

// A property of the work planned, which no other thread is changing meanwhile.
template <class Property>
auto of_plan(Property property) {
    return [property](cpu::PagedAttention& attention) {
        const auto claim = attention.claim();
        return property(attention.work());
    };
}

}  // namespace

void bind_cpu_attention(py::module_& module) {
    using cpu::PagedAttention;
    bind_class<TensorView>(module, "TensorView")
        .def(py::init<uintptr_t, Shape, Shape>(), py::arg("address"), py::arg("shape"), py::arg("strides"))
        .def_readonly("address", &TensorView::address)
        .def_readonly("shape", &TensorView::shape)
        .def_readonly("strides", &TensorView::strides);
    bind_class<PagedAttention>(module, "CpuAttention")
        .def(py::init(&make), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"),
             py::arg("dtype"))
        .def("plan", &plan, py::arg("query_start").noconvert(), py::arg("seq_lens").noconvert(),
             py::arg("block_tables").noconvert(), py::arg("num_blocks"), py::kw_only(),
             py::arg("num_threads") = 0, py::arg("share").noconvert() = true,
             py::arg("min_shared_tokens") = 64)
        .def("run", &run, py::arg("query"), py::arg("k_cache"), py::arg("v_cache"), py::arg("out"),
             py::arg("scale"))
        .def_property_readonly("num_items", of_plan([](const auto& work) { return work.items.size(); }))
        .def_property_readonly("num_partials", of_plan([](const auto& work) { return work.num_partials; }))
        .def_property_readonly("num_sharing", of_plan([](const auto& work) { return work.num_sharing; }));
}

}  // namespace parrot
