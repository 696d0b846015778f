// A trace as a Python object.
#pragma once

#include <memory>
#include <string>

#include "traces/trace.hpp"

namespace kvlab::python {

struct Trace {
  std::string path;  ///< the path as it was requested
  std::shared_ptr<const TraceReader> reader;
};

}  // namespace kvlab::python
