// Numbers and names as text. Pages use the same formats (sim/report/page/text.js).
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "sim/run/ranking.hpp"

namespace kvlab {

/// `text`, escaped for use in the content of an HTML element or in a quoted attribute.
std::string escape(std::string_view text);

/// About three significant digits, no exponent: 0.0123, 1.23, 12.3, 1,230.
std::string number_text(double value);
/// `0.123 ± 0.004`: the mean and its standard error with the same number of decimals, or only the
/// mean if the error is unknown. A share is written with its 95% interval: `0.900 (0.683 to
/// 0.988)`.
std::string average_text(const Average& average);
/// 12.3 KiB.
std::string bytes_text(double bytes);
/// `a`, `a and b`, `a, b and c`.
std::string join_names(const std::vector<std::string>& names);

}  // namespace kvlab
