// Comma-separated values as RFC 4180 has them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

}  // namespace kvlab
