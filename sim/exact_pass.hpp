// One exact pass of attention over a trace: what the time of a replay is held against.
#pragma once

#include "traces/base/work_time.hpp"

namespace kvlab {

struct ExactPass {
  WorkTime time;
  double flops = 0;  ///< of its products
};

}  // namespace kvlab
