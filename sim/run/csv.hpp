// Comma-separated values as RFC 4180 has them.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "traces/base/text.hpp"

namespace kvlab {

/// `text` as a field: quoted where it has to be.
std::string csv_field(std::string_view text);

/// Reads one record after another. Lines end in "\n" or "\r\n"; quoted fields may hold either.
class CsvReader {
 public:
  /// `text` must outlive the reader.
  explicit CsvReader(std::string_view text) : rest_(text) {}

  /// The fields of the next record; nothing at the end. Throws std::runtime_error ("line N: …") for
  /// a quote that is never closed or that stands where none may.
  std::optional<std::vector<std::string>> next();
  /// The line on which the record read last began, from 1.
  std::size_t line() const { return line_; }

 private:
  std::string field();
  std::string quoted_field();

  std::string_view rest_;
  std::size_t line_ = 0, next_line_ = 1;
};

/// A field as an error line may quote it: short, no control characters.
inline std::string shown_field(std::string_view field) { return printable(field.substr(0, 40)); }

/// The number in a field. Throws std::runtime_error that names the column.
template <class T>
T csv_number(const std::string& field, std::string_view column) {
  T value{};
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
  bool good = error == std::errc{} && end == field.data() + field.size();
  if constexpr (std::is_floating_point_v<T>) good = good && std::isfinite(value);
  if (!good)
    throw std::runtime_error(
        fmt::format("{} '{}' should be a {}", column, shown_field(field),
                    std::is_floating_point_v<T> ? "finite number" : "whole number in range"));
  return value;
}

/// The fields of one record, by the names in its table's header.
struct CsvRecord {
  std::vector<std::string> header, fields;
  std::size_t line = 0;

  /// Whether there is such a column, and something in it.
  bool has(std::string_view column) const;
  /// Throws std::runtime_error where there is no such column.
  const std::string& text(std::string_view column) const;
  template <class T>
  T number(std::string_view column) const {
    return csv_number<T>(text(column), column);
  }
};

/// Each record behind the header of a table. Errors, those of `read` too, name `file` and the line.
void read_records(std::string_view text, std::string_view file,
                  const std::function<void(const CsvRecord&)>& read);

}  // namespace kvlab
