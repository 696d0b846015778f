#include "sim/report/text.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace kvlab {
namespace {

/// The number of decimals with which `value` has about three significant digits.
int decimals_of(double value) {
  const double size = std::abs(value);
  if (size == 0 || !std::isfinite(value)) return 0;
  return static_cast<int>(std::clamp(2 - std::floor(std::log10(size)), 0.0, 8.0));
}

std::string add_separators(std::string digits) {
  const std::size_t end = std::min(digits.find('.'), digits.size());
  const std::size_t first = digits.starts_with('-') ? 1 : 0;
  for (std::size_t at = end; at > first + 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

}  // namespace

std::string escape(std::string_view text) {
  constexpr std::string_view kSpecial = "&<>\"'",
                             kEscapes[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string safe;
  for (const char c : text) {
    const std::size_t special = kSpecial.find(c);
    safe += special == kSpecial.npos ? std::string_view(&c, 1) : kEscapes[special];
  }
  return safe;
}

std::string number_text(double value) {
  // As on pages, -0 is shown as 0, and NaN without a sign.
  if (value == 0) return "0";
  if (std::isnan(value)) return "nan";
  return add_separators(fmt::format("{:.{}f}", value, decimals_of(value)));
}

std::string average_text(const Average& average) {
  const double size = std::abs(average.mean), error = average.standard_error;
  const auto [low, high] = average.interval;
  if (std::abs(low + high - 2 * average.mean) > 1e-6)  // the interval of a share is asymmetric
    return fmt::format("{:.3f} ({:.3f} to {:.3f})", average.mean, low, high);
  if (!std::isfinite(error) || error == 0) return number_text(average.mean);
  // Small numbers get the same number of decimals, so that columns align. An error shows at least
  // one significant digit.
  int decimals = size >= 100 ? 0 : size >= 10 ? 1 : 3;
  decimals = std::clamp(std::max(decimals, decimals_of(error) - 2), 0, 6);
  std::string mean = fmt::format("{:.{}f}", average.mean, decimals);
  if (mean.starts_with('-') && mean.find_first_not_of("-0.") == std::string::npos) mean.erase(0, 1);
  return fmt::format("{} ± {:.{}f}", mean, error, decimals);
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) bytes /= 1024, ++unit;
  return number_text(bytes) + " " + kUnits[unit];
}

std::string join_names(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " and " : ", ";
    text += names[i];
  }
  return text;
}

}  // namespace kvlab
