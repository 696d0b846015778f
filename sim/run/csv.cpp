#include "sim/run/csv.hpp"

#include <algorithm>

namespace kvlab {

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\r\n") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::optional<std::vector<std::string>> CsvReader::next() {
  if (rest_.empty()) return std::nullopt;
  line_ = next_line_;
  std::vector<std::string> fields;
  for (;;) {
    fields.push_back(rest_.starts_with('"') ? quoted_field() : field());
    if (!rest_.starts_with(',')) break;
    rest_.remove_prefix(1);
  }
  if (rest_.starts_with('\r')) rest_.remove_prefix(1);
  if (rest_.starts_with('\n')) rest_.remove_prefix(1);
  ++next_line_;
  return fields;
}

std::string CsvReader::field() {
  const std::size_t newline = std::min(rest_.find('\n'), rest_.size());
  std::size_t end = std::min(rest_.find(','), newline);
  if (end == newline && end > 0 && rest_[end - 1] == '\r') --end;
  std::string text(rest_.substr(0, end));
  if (text.find_first_of("\"\r") != std::string::npos)
    throw std::runtime_error(
        fmt::format("line {}: a quote inside a field; the whole field should be quoted", line_));
  rest_.remove_prefix(end);
  return text;
}

std::string CsvReader::quoted_field() {
  rest_.remove_prefix(1);
  std::string text;
  for (;;) {
    const std::size_t quote = rest_.find('"');
    if (quote == std::string_view::npos)
      throw std::runtime_error(fmt::format("line {}: a quoted field is never closed", line_));
    text += rest_.substr(0, quote);
    rest_.remove_prefix(quote + 1);
    if (!rest_.starts_with('"')) break;
    text += '"';
    rest_.remove_prefix(1);
  }
  next_line_ += static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
  if (!rest_.empty() && rest_.front() != ',' && rest_.front() != '\n' && !rest_.starts_with("\r\n"))
    throw std::runtime_error(
        fmt::format("line {}: text after a closing quote; a comma should follow", line_));
  return text;
}

bool CsvRecord::has(std::string_view column) const {
  return std::ranges::find(header, column) != header.end() && !text(column).empty();
}

const std::string& CsvRecord::text(std::string_view column) const {
  const auto found = std::ranges::find(header, column);
  if (found == header.end()) throw std::runtime_error(fmt::format("no column {}", column));
  return fields[static_cast<std::size_t>(found - header.begin())];
}

void read_records(std::string_view text, std::string_view file,
                  const std::function<void(const CsvRecord&)>& read) {
  CsvReader reader(text);
  try {
    CsvRecord record{.header = reader.next().value_or(std::vector<std::string>{})};
    while (auto fields = reader.next()) try {
        if (fields->size() != record.header.size())
          throw std::runtime_error(
              fmt::format("{} columns; there should be {}", fields->size(), record.header.size()));
        record.fields = std::move(*fields);
        record.line = reader.line();
        read(record);
      } catch (const std::exception& error) {
        throw std::runtime_error(fmt::format("line {}: {}", reader.line(), error.what()));
      }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace kvlab
