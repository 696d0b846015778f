// Parses a number in the text of a setting.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <stdexcept>
#include <string_view>

namespace kvlab {

/// Parses a finite number. Throws std::invalid_argument with the message "WHAT: 'TEXT' should be
/// SHOULD".
inline double parse_number(std::string_view text, std::string_view what, std::string_view should) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || !std::isfinite(value))
    throw std::invalid_argument(fmt::format("{}: '{}' should be {}", what, text, should));
  return value;
}

}  // namespace kvlab
