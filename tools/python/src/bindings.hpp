// The parts of the extension module _kvlab. Only the Python package (tools/python/kvlab) uses it.
// The parts convert arguments and results, and call the C++ functions that do the work.
#pragma once

#include <nanobind/nanobind.h>

namespace kvlab::python {

namespace nb = nanobind;

void bind_trace(nb::module_& module);
void bind_trace_writer(nb::module_& module);
void bind_arrays(nb::module_& module);
void bind_policies(nb::module_& module);
void bind_replay(nb::module_& module);
void bind_projections(nb::module_& module);
void bind_cache_request(nb::module_& module);
void bind_caches(nb::module_& module);
void bind_command(nb::module_& module);

}  // namespace kvlab::python
