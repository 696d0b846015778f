#include <nanobind/nanobind.h>

#include <exception>
#include <typeinfo>

#include "tools/python/src/bindings.hpp"

namespace {

/// A value that no conversion takes is an argument that is no good: ValueError, like all others.
/// The package checks arguments by name before they come here.
void translate_casts(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::bad_cast&) {
    PyErr_SetString(PyExc_ValueError, "an argument has a type that is not expected here");
  }
}

}  // namespace

NB_MODULE(_kvlab, module) {
  nanobind::register_exception_translator(translate_casts);
  module.doc() = "The compiled half of kvlab.";
  nanobind::set_leak_warnings(false);  // own policies live as long as the process
  module.attr("version") = KVLAB_RELEASE;
  kvlab::python::bind_trace(module);
  kvlab::python::bind_trace_writer(module);
  kvlab::python::bind_arrays(module);
  kvlab::python::bind_policies(module);
  kvlab::python::bind_projections(module);
  kvlab::python::bind_replay(module);
  kvlab::python::bind_cache_request(module);
  kvlab::python::bind_caches(module);
  kvlab::python::bind_command(module);
}
