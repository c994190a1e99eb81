// Binds csrc/kvcache.
#include <pybind11/pybind11.h>

namespace parrot {
void bind_kvcache(pybind11::module_&) {}
}  // namespace parrot
