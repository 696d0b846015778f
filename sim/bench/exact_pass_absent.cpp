#include <stdexcept>

#include "sim/exact_pass.hpp"

namespace kvlab {

ExactPass exact_pass(const TraceReader&, unsigned) {
  throw std::runtime_error(
      "bench replay: this build is without OpenBLAS, with which it compares; install its "
      "development files (libopenblas-dev) and configure again");
}

}  // namespace kvlab
