// The metrics of a run as the rows of results.csv. A row has one value, with all its keys (tidy
// data): trace, policy, budget, layer, head, metric and so on.
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
/// The description of a metric, for rankings and for display.
struct MetricInfo {
  std::string_view name;
  std::string_view label;  ///< label of an axis
  bool higher_is_better;
  bool ranks;  ///< false for bookkeeping metrics (bytes, evictions), by which deploy does not rank
};

/// Every metric that a results file may have. The entry `passage_recall` stands for
/// `passage_recall:NAME` with any name.
std::span<const MetricInfo> all_metrics();
/// Null for an unknown name. All `passage_recall:NAME` share one description.
const MetricInfo* find_metric(std::string_view name);
/// The description of a metric by which configurations may be ranked. For any other name, throws
/// std::invalid_argument with a text about --metric.
const MetricInfo& deciding_metric(std::string_view name);

/// One row. `layer` and `head` are -1 where the file has `all`.
struct ResultRow {
  std::string trace, policy, params, budget;
  std::uint32_t budget_tokens = 0;
  std::string prefill, positions, queries;
  double threshold = 0;
  std::uint64_t seed = 0;
  std::int32_t layer = -1, head = -1;
  std::string metric;
  double value = 0;
  double standard_error = 0;  ///< NaN if unknown
  std::uint64_t count = 0;    ///< number of values that `value` is computed from
  std::string tier_plan = "16";
  double budget_bytes = std::numeric_limits<double>::quiet_NaN();  ///< of all layers; NaN: unknown
  /// Values by which configurations are compared in pairs: the metric by block of queries or
  /// tokens, or by sample, with their weights (empty: equal weights). NaN: the block has no value.
  std::vector<double> blocks = {}, block_weights = {};
  /// Hash of the trace, which identifies the text. If it is empty, `trace` identifies the text.
  std::string text = {};
  bool counts = true;  ///< false if another trace has the same text and is used instead
};

/// The rows of the replay of one trace, in the order of the measurements. A value that is NaN (for
/// example, the miss rate of a head without requests) has no row.
std::vector<ResultRow> result_rows(std::string_view trace, std::span<const CacheConfig> sweep,
                                   const ReplayOptions& options, const ReplayResult& result);

/// The metric to use for deployment: the best metric that every trace of the rows has. A metric is
/// better if its order of policies agrees more with that of the end-to-end evaluation
/// (docs/guides/fidelity.md).
std::string_view best_metric(std::span<const ResultRow> rows);
/// If only some traces have a better metric: a sentence that says so. Otherwise "".
std::string best_metric_text(std::span<const ResultRow> rows);
/// The best metric among those for which `is_in_every_trace(metric)` is true.
std::string_view best_metric(const std::function<bool(const std::string&)>& is_in_every_trace);

/// Writes comma-separated values according to RFC 4180, but with "\n" between records. Numbers are
/// in the shortest form that converts back to the same value.
std::string results_csv(std::span<const ResultRow> rows);

/// Reads an untrusted file in the format of results_csv(). Throws std::runtime_error, which names
/// `file` and the line, for another header, a wrong number of columns, an invalid or infinite
/// number, an unknown metric, or a duplicate row.
std::vector<ResultRow> parse_results_csv(std::string_view text, std::string_view file);

/// blocks_csv() writes ResultRow::blocks of all rows, one value per line. parse_blocks_csv() reads
/// an untrusted file of that format into `rows`. It throws as parse_results_csv() does, and also
/// for blocks that have no row or are out of order.
std::string blocks_csv(std::span<const ResultRow> rows);
void parse_blocks_csv(std::string_view text, std::string_view file, std::span<ResultRow> rows);

// Comma-separated values according to RFC 4180.

/// `text` as a field, quoted if necessary.
std::string csv_field(std::string_view text);

/// Reads records one by one. Lines end in "\n" or "\r\n"; quoted fields may contain either.
class CsvReader {
 public:
  /// `text` must outlive the reader.
  explicit CsvReader(std::string_view text) : rest_(text) {}

  /// The fields of the next record; nullopt at the end. Throws std::runtime_error ("line N: …") for
  /// a quote that is not closed or misplaced.
  std::optional<std::vector<std::string>> next();
  /// The line on which the last record began, from 1.
  std::size_t line() const { return line_; }

 private:
  std::string field();
  std::string quoted_field();

  std::string_view rest_;
  std::size_t line_ = 0, next_line_ = 1;
};

/// A field as error messages show it: at most 40 characters, without control characters.
inline std::string shown_field(std::string_view field) { return printable(field.substr(0, 40)); }

/// The number in a field. For any other text, throws std::runtime_error that names the column.
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

/// The fields of one record, by the column names of its table.
struct CsvRecord {
  std::vector<std::string> header, fields;
  std::size_t line = 0;

  /// Whether the column exists and the field is not empty.
  bool has(std::string_view column) const;
  /// Throws std::runtime_error if the column does not exist.
  const std::string& text(std::string_view column) const;
  template <class T>
  T number(std::string_view column) const {
    return csv_number<T>(text(column), column);
  }
};

/// Calls `read` for each record after the header. Errors, including those of `read`, name `file`
/// and the line.
void read_records(std::string_view text, std::string_view file,
                  const std::function<void(const CsvRecord&)>& read);

}  // namespace kvlab
