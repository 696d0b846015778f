// NaN, which stands for an unknown number.
#pragma once

#include <limits>

namespace kvlab {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

}  // namespace kvlab
