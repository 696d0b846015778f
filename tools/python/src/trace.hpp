// A trace as Python holds it.
#pragma once

#include <memory>
#include <string>

#include "traces/trace.hpp"

namespace kvlab::python {

struct Trace {
  std::string path;  ///< as it was requested
  std::shared_ptr<const TraceReader> reader;
};

}  // namespace kvlab::python
