// How the classes of the native core are bound.
#pragma once

#include <pybind11/pybind11.h>

namespace parrot {

// Python's way to an object without `__init__`, such as `cls.__new__(cls)`, would give one without a native
// object behind it, and verbs would read memory that is nobody's. So what is new is initialised at once; the
// call of `__init__` that follows changes nothing. No subclass comes in between: see bind_class.
inline PyObject* new_initialised(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
    PyObject* object = type->tp_base->tp_new(type, arguments, keywords);
    if (object != nullptr && type->tp_init(object, arguments, keywords) != 0) Py_CLEAR(object);
    return object;
}

// A class that has no subclasses and no objects that are not initialised.
template <class T, class... Extra>
pybind11::class_<T> bind_class(pybind11::module_& module, const char* name, const Extra&... extra) {
    const auto set_up = [](PyHeapTypeObject* type) { type->ht_type.tp_new = new_initialised; };
    return pybind11::class_<T>(module, name, pybind11::is_final(), pybind11::custom_type_setup(set_up),
                               extra...);
}

}  // namespace parrot
