// Small pieces of HTML. All text passes through escape().
#pragma once

#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "sim/run/ranking.hpp"

namespace kvlab {

/// `text` escaped for an element's content or a quoted attribute.
std::string escape(std::string_view text);

/// About three significant digits, no exponent: 0.0123, 1.23, 12.3, 1,230.
std::string number_text(double value);
/// `0.123 ± 0.004`, with the error rounded to the mean's digits, or without error if it is unknown.
/// A share is written with its interval: `0.900 (0.683 to 0.988)`.
std::string average_text(const Average& average);
/// 12.3 KiB.
std::string bytes_text(double bytes);
/// `a`, `a and b`, `a, b and c`.
std::string join_names(const std::vector<std::string>& names);

struct Column {
  std::string heading;
  bool numeric = true;
  bool wraps = false;
};
/// HTML of a cell, and its number, which files contain.
struct Cell {
  std::string html;
  double value = std::numeric_limits<double>::quiet_NaN(), error = value;  ///< NaN: none

  Cell(std::string text) : html(std::move(text)) {}
  Cell(const char* text) : html(text) {}
  Cell(std::string text, double number) : html(std::move(text)), value(number) {}
};
Cell number_cell(double value);  ///< a dash for NaN
Cell average_cell(const Average& average);
Cell bytes_cell(double bytes);

/// `caption` may be empty. The first column stays visible while the others scroll.
std::string table(const std::vector<Column>& columns, const std::vector<std::vector<Cell>>& rows,
                  std::string_view caption = {});

}  // namespace kvlab
