// The figures of a run: one row each, as results.csv holds them. Tidy: every row stands alone.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sim/replay.hpp"

namespace kvlab {

/// What is known of a metric, for ranking and for people.
struct MetricInfo {
  std::string_view name;
  std::string_view label;  ///< as an axis is labelled
  bool higher_is_better;
  bool ranks;  ///< false: a bookkeeping figure (bytes, evictions); deploy does not rank by it
};

/// Every metric that a results file may hold; `span_recall` stands for `span_recall:NAME`.
std::span<const MetricInfo> all_metrics();
/// Null if there is none of that name. All of `span_recall:NAME` have one description.
const MetricInfo* find_metric(std::string_view name);
/// One that may decide. Throws std::invalid_argument, about --metric.
const MetricInfo& deciding_metric(std::string_view name);

/// One row. `layer` and `head` are -1 where the file says `all`.
struct ResultRow {
  std::string trace, policy, params, budget;
  std::uint32_t budget_tokens = 0;
  std::string prefill, positions, span;
  double threshold = 0;
  std::uint64_t seed = 0;
  std::int32_t layer = -1, head = -1;
  std::string metric;
  double value = 0;
  double standard_error = 0;  ///< NaN where there is none
  std::uint64_t count = 0;    ///< queries x query heads
  std::string ladder = "16";
  double budget_bytes = std::numeric_limits<double>::quiet_NaN();  ///< of all layers; NaN: unknown
  /// What it is paired by with other configurations: the figure by block of queries, of tokens, or
  /// by draw, and how much each counts (empty: alike). NaN: nothing in that block.
  std::vector<double> blocks = {}, block_weights = {};
  std::string text = {};  ///< the trace's hash: equal ones are one text; empty: by `trace`
};

/// The rows of one trace's replay, in the order of the measurements. A value that is not a number
/// (a head without requests has no miss rate) has no row.
std::vector<ResultRow> result_rows(std::string_view trace, std::span<const CacheConfig> grid,
                                   const ReplayOptions& options, const ReplayResult& result);

/// What deployment goes by: of the figures that order policies as the closed loop does, the best
/// that every trace of the rows has (docs/fidelity.md).
std::string_view best_metric(std::span<const ResultRow> rows);
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

}  // namespace kvlab
