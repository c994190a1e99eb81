// Binds csrc/scheduler.
#include <pybind11/pybind11.h>

namespace parrot {
void bind_scheduler(pybind11::module_&) {}
}  // namespace parrot
