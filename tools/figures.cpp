#include "tools/figures.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;
using Cells = std::vector<std::string>;

/// Four digits, and thousands as k, M, G, T.
std::string shortened(const ordered_json& value) {
  if (!value.is_number()) return value.is_string() ? value.get<std::string>() : json_text(value);
  double number = value.get<double>();
  if (value.is_number_integer() && std::fabs(number) < 1e6) return json_text(value);
  std::string_view unit = "";
  for (const std::string_view larger : {"k", "M", "G", "T"}) {
    if (std::fabs(number) < 1e4) break;
    number /= 1e3;
    unit = larger;
  }
  return fmt::format("{:.4g}{}", number, unit);
}

/// The first line names the columns; `first`: what stands before each row.
class Table {
 public:
  void add(const ordered_json& row, const std::string& first = "") {
    Cells names{""}, cells{first};
    for (const auto& [name, value] : row.items()) {
      if (!value.is_array()) {
        names.push_back(name);
        cells.push_back(shortened(value));
        continue;
      }
      for (const ordered_json& column : value) {
        names.push_back(shortened(column.front()));
        cells.push_back(shortened(column.back()));
      }
    }
    if (names.size() > lines_.front().size()) lines_.front() = names;
    lines_.push_back(std::move(cells));
  }

  void print() const {
    for (const Cells& line : lines_) {
      for (std::size_t column = 0; column < line.size(); ++column) {
        std::size_t width = 0;
        for (const Cells& other : lines_)
          if (column < other.size()) width = std::max(width, other[column].size());
        const bool last = column + 1 == line.size();
        fmt::print("{:<{}}{}", line[column], last ? 0 : width, last ? "\n" : "  ");
      }
    }
  }

 private:
  std::vector<Cells> lines_{Cells{}};
};

}  // namespace

void print_figures(const ordered_json& figures) {
  Table rows;
  for (const auto& [name, value] : figures.items()) {
    if (value.is_object()) {
      rows.add(value, name);
      continue;
    }
    if (!value.is_array()) {
      fmt::print("{:<26}{}\n", name, shortened(value));
      continue;
    }
    fmt::print("{}\n", name);
    Table table;
    for (const ordered_json& row : value) table.add(row);
    table.print();
  }
  rows.print();
}

}  // namespace kvlab
