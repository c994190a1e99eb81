// Binds the CPU kernels around attention: packed linear layers, rotary embedding.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "concat.h"
#include "core_buffers.h"
#include "core_types.h"
#include "kernels/cpu/argmax.h"
#include "kernels/cpu/kv_block.h"
#include "kernels/cpu/linear.h"
#include "kernels/cpu/rope.h"

namespace py = pybind11;

namespace parrot {
namespace {

using cpu::DType;
using cpu::PackedLinear;
using Floats = py::array_t<float, py::array::c_style>;
using Int64s = py::array_t<int64_t, py::array::c_style>;
using Shape = std::vector<py::ssize_t>;

std::string text_of(const Shape& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += concat(i == 0 ? "" : ", ", shape[i]);
    return text + "]";
}

Shape shape_of(const py::array& array) { return {array.shape(), array.shape() + array.ndim()}; }

void check_shape(const char* name, const py::array& array, const Shape& expected) {
    if (shape_of(array) != expected) {
        throw std::invalid_argument(
            concat(name, " has the shape ", text_of(shape_of(array)), ", expected ", text_of(expected)));
    }
}

// float32, or bf16 as uint16; C-contiguous.
DType check_dtype(const char* name, const py::array& array) {
    if ((array.flags() & py::array::c_style) == 0) {
        throw std::invalid_argument(concat(name, " must be C-contiguous"));
    }
    require_aligned(name, array);
    if (py::isinstance<py::array_t<float>>(array)) return DType::kFloat32;
    if (py::isinstance<py::array_t<uint16_t>>(array)) return DType::kBFloat16;
    throw std::invalid_argument(concat(name, " has the dtype ", py::str(array.dtype()).cast<std::string>(),
                                       ", expected float32, or uint16 for the bits of bf16"));
}

struct Named {
    const char* name;
    const py::array& array;
};

// Outputs lie over no other argument.
void check_memory(std::initializer_list<Named> outputs, std::initializer_list<Named> inputs) {
    for (const Named& input : inputs) require_aligned(input.name, input.array);
    for (const Named* output = outputs.begin(); output != outputs.end(); ++output) {
        require_output(output->name, output->array);
        const Extent written = extent_of(output->name, output->array);
        for (const Named& input : inputs) require_apart(written, {extent_of(input.name, input.array)});
        for (const Named* other = output + 1; other != outputs.end(); ++other) {
            require_apart(written, {extent_of(other->name, other->array)});
        }
    }
}

PackedLinear pack(const py::array& weight, bool gated) {
    const DType dtype = check_dtype("weight", weight);
    if (weight.ndim() != 2) {
        throw std::invalid_argument(
            concat("weight has the shape ", text_of(shape_of(weight)), ", expected two axes"));
    }
    const void* data = weight.data();
    const int64_t rows = weight.shape(0), columns = weight.shape(1);
    py::gil_scoped_release release;
    return PackedLinear(data, dtype, rows, columns, gated);
}

void forward(const PackedLinear& linear, const py::array& x, Floats& out, const std::optional<Floats>& norm,
             float eps, bool add) {
    const DType dtype = check_dtype("x", x);
    const py::ssize_t rows = x.ndim() == 2 ? x.shape(0) : -1;
    check_shape("x", x, {rows, linear.in_features()});
    check_shape("out", out, {rows, linear.num_outputs()});
    if (norm) check_shape("norm", *norm, {linear.in_features()});
    if (norm && dtype != DType::kFloat32) throw std::invalid_argument("x must be float32 to be normalised");
    if (!(eps >= 0 && std::isfinite(eps))) {
        throw std::invalid_argument(concat("eps = ", eps, " is negative or not finite"));
    }
    check_memory({{"out", out}}, {{"x", x}, {"norm", norm ? *norm : x}});
    const cpu::LinearInput input{x.data(), dtype, rows, norm ? norm->data() : nullptr, eps};
    float* data = out.mutable_data();
    py::gil_scoped_release release;
    linear.forward(input, data, add);
}

void gather(const PackedLinear& linear, const Int64s& rows, Floats& out) {
    if (linear.gated()) throw std::invalid_argument("rows of a gated layer cannot be gathered");
    check_shape("rows", rows, {rows.size()});
    check_shape("out", out, {rows.size(), linear.in_features()});
    check_memory({{"out", out}}, {{"rows", rows}});
    for (py::ssize_t i = 0; i < rows.size(); ++i) {
        if (rows.data()[i] < 0 || rows.data()[i] >= linear.out_features()) {
            throw std::invalid_argument(
                concat("rows[", i, "] = ", rows.data()[i], " is outside [0, ", linear.out_features(), ")"));
        }
    }
    for (py::ssize_t i = 0; i < rows.size(); ++i) linear.read_row(rows.data()[i], out.mutable_data(i));
}

void rope_append(const Floats& qkv, const Floats& cos, const Floats& sin, const Int64s& slots,
                 py::array& query, py::array& key_cache, py::array& value_cache) {
    const DType dtype = check_dtype("query", query);
    if (check_dtype("key_cache", key_cache) != dtype || check_dtype("value_cache", value_cache) != dtype) {
        throw std::invalid_argument("query, key_cache and value_cache must have one dtype");
    }
    if (query.ndim() != 3 || key_cache.ndim() != 4 || query.shape(2) % 2 != 0 ||
        query.shape(2) > cpu::kMaxHeadDim) {
        throw std::invalid_argument(
            concat("query must be [rows, heads, head_dim] with an even head_dim of at most ",
                   cpu::kMaxHeadDim, ", and key_cache [num_blocks, 16, kv_heads, head_dim]; got ",
                   text_of(shape_of(query)), " and ", text_of(shape_of(key_cache))));
    }
    const py::ssize_t rows = query.shape(0), heads = query.shape(1), head_dim = query.shape(2);
    const py::ssize_t num_slots = key_cache.shape(0) * cpu::kBlockTokens, kv_heads = key_cache.shape(2);
    check_shape("key_cache", key_cache, {key_cache.shape(0), cpu::kBlockTokens, kv_heads, head_dim});
    check_shape("value_cache", value_cache, shape_of(key_cache));
    check_shape("qkv", qkv, {rows, (heads + 2 * kv_heads) * head_dim});
    check_shape("cos", cos, {rows, head_dim / 2});
    check_shape("sin", sin, {rows, head_dim / 2});
    check_shape("slots", slots, {rows});
    check_memory({{"query", query}, {"key_cache", key_cache}, {"value_cache", value_cache}},
                 {{"qkv", qkv}, {"cos", cos}, {"sin", sin}, {"slots", slots}});
    for (py::ssize_t i = 0; i < rows; ++i) {
        if (slots.data()[i] < 0 || slots.data()[i] >= num_slots) {
            throw std::invalid_argument(
                concat("slots[", i, "] = ", slots.data()[i], " is outside [0, ", num_slots, ")"));
        }
    }
    const cpu::RopeAppendCall call{qkv.data(),
                                   cos.data(),
                                   sin.data(),
                                   slots.data(),
                                   query.mutable_data(),
                                   key_cache.mutable_data(),
                                   value_cache.mutable_data(),
                                   dtype,
                                   rows,
                                   heads,
                                   kv_heads,
                                   head_dim};
    py::gil_scoped_release release;
    cpu::rope_append(call);
}

void argmax_rows(const Floats& logits, Int64s& ids) {
    if (logits.ndim() != 2 || logits.shape(1) == 0) {
        throw std::invalid_argument(concat("logits has the shape ", text_of(shape_of(logits)),
                                           ", expected two axes and at least one column"));
    }
    check_shape("ids", ids, {logits.shape(0)});
    check_memory({{"ids", ids}}, {{"logits", logits}});
    const float* values = logits.data();
    const int64_t rows = logits.shape(0), columns = logits.shape(1);
    int64_t* out = ids.mutable_data();
    py::gil_scoped_release release;
    cpu::argmax_rows(values, rows, columns, out);
}

}  // namespace

void bind_cpu_ops(py::module_& module) {
    bind_class<PackedLinear>(module, "PackedLinear")
        .def(py::init(&pack), py::arg("weight").noconvert(), py::kw_only(),
             py::arg("gated").noconvert() = false)
        .def("forward", &forward, py::arg("x").noconvert(), py::arg("out").noconvert(),
             py::arg("norm").noconvert() = py::none(), py::arg("eps") = 0.0F, py::kw_only(),
             py::arg("add").noconvert() = false)
        .def("gather", &gather, py::arg("rows").noconvert(), py::arg("out").noconvert())
        .def_property_readonly("out_features", &PackedLinear::out_features)
        .def_property_readonly("in_features", &PackedLinear::in_features)
        .def_property_readonly("num_outputs", &PackedLinear::num_outputs)
        .def_property_readonly("num_bytes", &PackedLinear::num_bytes);
    module.def("rope_append", &rope_append, py::arg("qkv").noconvert(), py::arg("cos").noconvert(),
               py::arg("sin").noconvert(), py::arg("slots").noconvert(), py::arg("query").noconvert(),
               py::arg("key_cache").noconvert(), py::arg("value_cache").noconvert());
    module.def("argmax_rows", &argmax_rows, py::arg("logits").noconvert(), py::arg("ids").noconvert());
}

}  // namespace parrot
