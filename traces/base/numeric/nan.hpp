// A number that is not known.
#pragma once

#include <limits>

namespace kvlab {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

}  // namespace kvlab
