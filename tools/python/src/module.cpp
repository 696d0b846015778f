#include <nanobind/nanobind.h>

#include "tools/python/src/bindings.hpp"

NB_MODULE(_kvlab, module) {
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
