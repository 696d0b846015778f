// The metrics of a run: one row each, as results.csv holds them. Tidy: every row stands alone.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "sim/replay.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
/// What is known of a metric, for ranking and for people.
struct MetricInfo {
  std::string_view name;
  std::string_view label;  ///< as an axis is labelled
  bool higher_is_better;
  bool ranks;  ///< false: a bookkeeping metric (bytes, evictions); deploy does not rank by it
};

/// Every metric that a results file may hold; `passage_recall` stands for `passage_recall:NAME`.
std::span<const MetricInfo> all_metrics();
/// Null if there is none of that name. All of `passage_recall:NAME` have one description.
const MetricInfo* find_metric(std::string_view name);
/// One that may decide. Throws std::invalid_argument, about --metric.
const MetricInfo& deciding_metric(std::string_view name);

/// One row. `layer` and `head` are -1 where the file says `all`.
struct ResultRow {
  std::string trace, policy, params, budget;
  std::uint32_t budget_tokens = 0;
  std::string prefill, positions, queries;
  double threshold = 0;
  std::uint64_t seed = 0;
  std::int32_t layer = -1, head = -1;
  std::string metric;
  double value = 0;
  double standard_error = 0;  ///< NaN where there is none
  std::uint64_t count = 0;    ///< queries x query heads
  std::string tier_plan = "16";
  double budget_bytes = std::numeric_limits<double>::quiet_NaN();  ///< of all layers; NaN: unknown
  /// What it is paired by with other configurations: the metric by block of queries, of tokens, or
  /// by sample, and how much each counts (empty: alike). NaN: nothing in that block.
  std::vector<double> blocks = {}, block_weights = {};
  std::string text = {};  ///< the trace's hash: equal ones are one text; empty: by `trace`
  bool counts = true;     ///< false: another trace has the same text, and counts
};

/// The rows of one trace's replay, in the order of the measurements. A value that is not a number
/// (a head without requests has no miss rate) has no row.
std::vector<ResultRow> result_rows(std::string_view trace, std::span<const CacheConfig> sweep,
                                   const ReplayOptions& options, const ReplayResult& result);

/// What deployment goes by: of the metrics that order policies as the end-to-end evaluation does,
/// the best that every trace of the rows has (docs/guides/fidelity.md).
std::string_view best_metric(std::span<const ResultRow> rows);
/// Why a better one that only some traces have does not decide, in a sentence; "" where none is.
std::string best_metric_text(std::span<const ResultRow> rows);
/// The same, where `in_every_trace(metric)` says what there is.
std::string_view best_metric(const std::function<bool(const std::string&)>& in_every_trace);

/// RFC 4180, "\n" between records; numbers in the shortest form that reads back to the same value.
std::string results_csv(std::span<const ResultRow> rows);

/// Reads what results_csv writes, from anyone. Throws std::runtime_error that names `file` and the
/// line: another header, a wrong number of columns, a number that is none or not finite, an unknown
/// metric, a row that is there twice.
std::vector<ResultRow> parse_results_csv(std::string_view text, std::string_view file);

/// ResultRow::blocks of all rows, one a line; and what reads them, from anyone, into the rows that
/// they are of. Throws as parse_results_csv, and for blocks of no row or out of order.
std::string blocks_csv(std::span<const ResultRow> rows);
void parse_blocks_csv(std::string_view text, std::string_view file, std::span<ResultRow> rows);

// Comma-separated values as RFC 4180 has them.

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
