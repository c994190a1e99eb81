// parrot._kernels: the CUDA kernels as a Python module; raw addresses, no framework. See _kernels.pyi.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>

#include "kernels/paged_prefill.h"
#include "kernels/shared_prefix_attention.h"

namespace py = pybind11;
using parrot::PagedPrefillCall;
using parrot::SharedPrefixAttentionCall;

namespace {

int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
    module.doc() = "Parrot's CUDA kernels; addresses, shapes and a stream, no framework";
    module.def("device_count", &device_count);
    module.def("shared_prefix_attention_grid", &parrot::shared_prefix_attention_grid, py::arg("head_dim"));
    module.def(
        "shared_prefix_attention",
        [](std::uintptr_t query, std::uintptr_t key_cache, std::uintptr_t value_cache, std::uintptr_t output,
           std::uintptr_t block_tables, std::uintptr_t entries, std::uintptr_t num_entries,
           std::uintptr_t members, std::uintptr_t part_begin, std::uintptr_t part_output,
           std::uintptr_t part_max_sum, std::uintptr_t next_work, int num_requests, int num_blocks,
           int max_blocks, int num_heads, int num_kv_heads, int head_dim, bool is_bfloat16,
           float softmax_scale, std::uintptr_t stream) {
            parrot::shared_prefix_attention(SharedPrefixAttentionCall{
                query,      key_cache,  value_cache,  output,       block_tables, entries,       num_entries,
                members,    part_begin, part_output,  part_max_sum, next_work,    num_requests,  num_blocks,
                max_blocks, num_heads,  num_kv_heads, head_dim,     is_bfloat16,  softmax_scale, stream});
        },
        py::kw_only(), py::arg("query"), py::arg("key_cache"), py::arg("value_cache"), py::arg("output"),
        py::arg("block_tables"), py::arg("entries"), py::arg("num_entries"), py::arg("members"),
        py::arg("part_begin"), py::arg("part_output"), py::arg("part_max_sum"), py::arg("next_work"),
        py::arg("num_requests"), py::arg("num_blocks"), py::arg("max_blocks"), py::arg("num_heads"),
        py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("is_bfloat16"), py::arg("softmax_scale"),
        py::arg("stream"));
    module.def("has_paged_prefill", &parrot::has_paged_prefill);
    module.def("paged_prefill_rows", &parrot::paged_prefill_rows);
    module.def(
        "paged_prefill",
        [](std::uintptr_t query, std::uintptr_t key_cache, std::uintptr_t value_cache, std::uintptr_t output,
           std::uintptr_t tiles, std::uintptr_t block_tables, std::uintptr_t next_work, int num_rows,
           int num_tiles, int num_tokens, int num_blocks, int max_blocks, int num_heads, int num_kv_heads,
           int head_dim, bool is_bfloat16, float softmax_scale, std::uintptr_t stream) {
            parrot::paged_prefill(PagedPrefillCall{query, key_cache, value_cache, output, tiles, block_tables,
                                                   next_work, num_rows, num_tiles, num_tokens, num_blocks,
                                                   max_blocks, num_heads, num_kv_heads, head_dim, is_bfloat16,
                                                   softmax_scale, stream});
        },
        py::kw_only(), py::arg("query"), py::arg("key_cache"), py::arg("value_cache"), py::arg("output"),
        py::arg("tiles"), py::arg("block_tables"), py::arg("next_work"), py::arg("num_rows"),
        py::arg("num_tiles"), py::arg("num_tokens"), py::arg("num_blocks"), py::arg("max_blocks"),
        py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("is_bfloat16"),
        py::arg("softmax_scale"), py::arg("stream"));
}
