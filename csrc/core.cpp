// parrot._core: the native core as a Python module. Each part binds itself; see python/parrot/_core.pyi.
#include <pybind11/pybind11.h>

namespace parrot {
void bind_attention_plan(pybind11::module_& module);
void bind_cpu(pybind11::module_& module);
void bind_cpu_ops(pybind11::module_& module);
void bind_cpu_attention(pybind11::module_& module);
void bind_kvcache(pybind11::module_& module);
void bind_prefix_index(pybind11::module_& module);
void bind_scheduler(pybind11::module_& module);
}  // namespace parrot

PYBIND11_MODULE(_core, module) {
    module.doc() = "Parrot's native core: KV cache, scheduler and CPU kernels";
    parrot::bind_attention_plan(module);
    parrot::bind_cpu(module);
    parrot::bind_cpu_ops(module);
    parrot::bind_cpu_attention(module);
    parrot::bind_kvcache(module);
    parrot::bind_prefix_index(module);
    parrot::bind_scheduler(module);
}
