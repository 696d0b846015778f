#include "sim/run/results.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <stdexcept>
#include <tuple>

#include "policies/old_names.hpp"
#include "traces/base/numeric/nan.hpp"
#include "traces/base/text.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kHeader =
    "trace,policy,params,budget,budget_tokens,prefill,positions,queries,threshold,seed,"
    "layer,head,metric,value,stderr,count,tiers,budget_bytes";
/// The header that older versions, without tier plans, wrote. It lacks the last two columns.
constexpr std::string_view kOlderHeader = kHeader.substr(0, kHeader.find(",tiers"));
/// Columns of kHeader that had other names in older files: {old name, current name}.
constexpr OldName kOldColumns[] = {{"ladder", "tiers"}, {"span", "queries"}};  // old name
constexpr std::string_view kBlockHeader =
    "trace,policy,params,budget,prefill,positions,seed,metric,block,value,weight";

constexpr bool higher = true, lower = false;  // the values of `better` in metrics.def
constexpr MetricInfo kMetrics[] = {
#define METRIC(name, label, better, decides, reduced) {#name, label, better, decides},
#include "sim/metrics/metrics.def"
};

std::string scope_text(std::int32_t index) { return index < 0 ? "all" : fmt::format("{}", index); }

/// A number as a field; empty for NaN.
std::string number_field(double value) { return std::isnan(value) ? "" : fmt::format("{}", value); }

void append_row(std::string& text, const ResultRow& row) {
  text += fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n",
                      csv_field(row.trace), csv_field(row.policy), csv_field(row.params),
                      csv_field(row.budget), row.budget_tokens, csv_field(row.prefill),
                      csv_field(row.positions), csv_field(row.queries), row.threshold, row.seed,
                      scope_text(row.layer), scope_text(row.head), csv_field(row.metric), row.value,
                      number_field(row.standard_error), row.count, csv_field(row.tier_plan),
                      number_field(row.budget_bytes));
}

/// The first line of a table, in which old names of columns are replaced by the current names.
std::string header_of(std::string_view text) {
  constexpr std::size_t kMaxHeader = 4096;  // bytes; no table of kvlab has a longer header
  std::string header(text.substr(0, std::min(text.find_first_of("\r\n"), kMaxHeader)));
  if (header.size() == kMaxHeader) return header;
  const std::vector<std::string> columns = split_list(header);
  header.clear();
  for (const std::string& column : columns) {
    if (!header.empty()) header += ',';
    header += current_name(kOldColumns, column);
  }
  return header;
}

/// Throws std::runtime_error if the table has another header.
void check_header(std::string_view text, std::string_view file, std::string_view header) {
  if (header_of(text) != header)
    throw std::runtime_error(fmt::format("{}: line 1: the header should read {}", file, header));
}

/// The key by which a block is assigned to its row. Only rows of the whole model have blocks.
std::string block_key(const ResultRow& row) {
  return fmt::format("{},{},{},{},{},{},{},{}", csv_field(row.trace), csv_field(row.policy),
                     csv_field(row.params), csv_field(row.budget), csv_field(row.prefill),
                     csv_field(row.positions), row.seed, csv_field(row.metric));
}

/// Parses one record, column by column. Errors name the column; the caller adds the file and the
/// line.
class RowParser {
 public:
  explicit RowParser(const std::vector<std::string>& fields) : fields_(fields) {}

  ResultRow parse() {
    ResultRow row;
    row.trace = name("trace");
    row.policy = name("policy");
    row.params = text();
    row.budget = name("budget");
    row.budget_tokens = number<std::uint32_t>("budget_tokens");
    if (row.budget_tokens == 0)
      throw std::runtime_error("budget_tokens is 0; it should be at least 1");
    row.prefill = parse_prefill(text()).text();
    row.positions = name_of(parse_positions(text()));
    row.queries = name_of(parse_queries(text()));
    row.threshold = number<double>("threshold");
    row.seed = number<std::uint64_t>("seed");
    row.layer = scope("layer");
    row.head = scope("head");
    if (row.layer < 0 && row.head >= 0) throw std::runtime_error("a head is given without a layer");
    row.metric = text();
    if (!find_metric(row.metric))
      throw std::runtime_error(fmt::format("unknown metric '{}'", shown_field(row.metric)));
    row.value = number<double>("value");
    check_value(row);
    row.standard_error = amount("stderr");
    row.count = number<std::uint64_t>("count");
    if (next_ == fields_.size()) return row;
    row.tier_plan = parse_tier_plan(text()).text();
    row.budget_bytes = amount("budget_bytes");
    return row;
  }

 private:
  /// Throws if a value is out of range. A value may be negative if the metric is a difference, or
  /// if the value is so small that rounding explains it.
  static void check_value(const ResultRow& row) {
    constexpr double kMax = 1e100, kRounding = 1e-6;
    const bool difference = row.metric.starts_with("regret_") || row.metric == "quantization_error";
    const double min_value = difference ? -kMax : -kRounding;
    if (row.value < min_value || row.value > kMax)
      throw std::runtime_error(fmt::format("{} of {:g} should be between {:g} and {:g}", row.metric,
                                           row.value, min_value, kMax));
  }

  std::string text() {
    const std::string& field = fields_[next_++];
    if (has_controls(field))
      throw std::runtime_error(
          fmt::format("column {}: a control character in '{}'", next_, shown_field(field)));
    return field;
  }

  std::string name(std::string_view column) {
    std::string field = text();
    if (field.empty()) throw std::runtime_error(fmt::format("{} is empty", column));
    return field;
  }

  template <class T>
  T number(std::string_view column) {
    return csv_number<T>(fields_[next_++], column);
  }

  /// A value that is not negative; NaN if the field is empty.
  double amount(std::string_view column) {
    if (fields_[next_].empty()) return ++next_, std::numeric_limits<double>::quiet_NaN();
    const auto value = number<double>(column);
    if (value < 0) throw std::runtime_error(fmt::format("{} is negative", column));
    return value;
  }

  std::int32_t scope(std::string_view column) {
    if (fields_[next_] == "all") return ++next_, -1;
    const auto index = number<std::int32_t>(column);
    if (index < 0)
      throw std::runtime_error(fmt::format("{} should be `all` or a number from 0", column));
    return index;
  }

  const std::vector<std::string>& fields_;
  std::size_t next_ = 0;
};

auto identity(const ResultRow& row) {
  return std::tie(row.trace, row.policy, row.params, row.budget, row.prefill, row.positions,
                  row.queries, row.threshold, row.seed, row.layer, row.head, row.metric);
}

/// Throws if two rows have the same identity. `lines` has the line number of each row.
void refuse_duplicates(const std::vector<ResultRow>& rows, const std::vector<std::size_t>& lines,
                       std::string_view file) {
  std::vector<std::size_t> order(rows.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return identity(rows[a]) < identity(rows[b]);
  });
  for (std::size_t i = 1; i < order.size(); ++i)
    if (identity(rows[order[i - 1]]) == identity(rows[order[i]]))
      throw std::runtime_error(fmt::format("{}: line {}: repeats the row of line {}", file,
                                           lines[order[i]], lines[order[i - 1]]));
}

}  // namespace

std::span<const MetricInfo> all_metrics() { return kMetrics; }

const MetricInfo* find_metric(std::string_view name) {
  const std::string_view all_passages = kPassageRecall.substr(0, kPassageRecall.size() - 1);
  if (name == all_passages || name == kPassageRecall) return nullptr;
  if (name.starts_with(kPassageRecall)) name = all_passages;
  const auto found = std::ranges::find(kMetrics, name, &MetricInfo::name);
  return found == std::end(kMetrics) ? nullptr : &*found;
}

const MetricInfo& deciding_metric(std::string_view name) {
  std::vector<std::string_view> known;
  for (const MetricInfo& metric : kMetrics)
    if (metric.ranks) known.push_back(metric.name);
  if (std::ranges::find(known, name) == known.end())
    throw std::invalid_argument(
        fmt::format("--metric: '{}' should be one of {}", name, fmt::join(known, ", ")));
  return *find_metric(name);
}

std::vector<ResultRow> result_rows(std::string_view trace, std::span<const CacheConfig> sweep,
                                   const ReplayOptions& options, const ReplayResult& result) {
  std::vector<ResultRow> rows;
  rows.reserve(result.measurements.size());
  std::vector<double> bytes(sweep.size(), kNaN);
  for (const Measurement& one : result.measurements)
    if (one.metric == "budget_bytes") bytes[one.config] = one.value;
  for (const Measurement& measurement : result.measurements) {
    if (std::isnan(measurement.value)) continue;
    const CacheConfig& config = sweep[measurement.config];
    rows.push_back({.trace = std::string(trace),
                    .policy = config.policy.name,
                    .params = config.policy.params_text(),
                    .budget = config.budget.text(),
                    .budget_tokens = result.budget_tokens[measurement.config],
                    .prefill = config.prefill.text(),
                    .positions = std::string(name_of(config.positions)),
                    .queries = std::string(name_of(options.queries)),
                    .threshold = config.threshold,
                    .seed = config.seed,
                    .layer = measurement.layer,
                    .head = measurement.head,
                    .metric = measurement.metric,
                    .value = measurement.value,
                    .standard_error = measurement.standard_error,
                    .count = measurement.count,
                    .tier_plan = config.policy.tier_plan.text(),
                    .budget_bytes = bytes[measurement.config],
                    .blocks = measurement.blocks});
  }
  return rows;
}

std::string_view best_metric(std::span<const ResultRow> rows) {
  std::set<std::string_view> traces;
  std::map<std::string, std::set<std::string_view>> metric_traces;
  for (const ResultRow& row : rows) {
    traces.insert(row.trace);
    metric_traces[row.metric].insert(row.trace);
  }
  return best_metric([&](const std::string& metric) { return metric_traces[metric] == traces; });
}

std::string_view best_metric(const std::function<bool(const std::string&)>& is_in_every_trace) {
  // With refetch, all policies attend to the same tokens. They differ only in how many tokens they
  // fetch, so fetch_rate comes first.
  for (const char* metric :
       {"fetch_rate", "kl_estimate_joint", "kl_estimate", "residual_error", "layer_error"})
    if (is_in_every_trace(metric)) return metric;
  return "nll_recall";
}

std::string best_metric_text(std::span<const ResultRow> rows) {
  const std::string_view best = best_metric(rows);
  for (const char* metric : {"kl_estimate_joint", "kl_estimate", "residual_error", "layer_error"}) {
    if (metric == best) return "";
    std::set<std::string_view> with, without;
    for (const ResultRow& row : rows)
      if (row.metric == metric) with.insert(row.trace);
    for (const ResultRow& row : rows)
      if (!with.contains(row.trace)) without.insert(row.trace);
    if (!with.empty() && !without.empty())
      return fmt::format(
          "the metric to choose by is {}, because trace {} has no {}, which trace {} has", best,
          *without.begin(), metric, *with.begin());
  }
  return "";
}

std::string results_csv(std::span<const ResultRow> rows) {
  std::string text = fmt::format("{}\n", kHeader);
  for (const ResultRow& row : rows) append_row(text, row);
  return text;
}

std::vector<ResultRow> parse_results_csv(std::string_view text, std::string_view file) {
  std::vector<ResultRow> rows;
  std::vector<std::size_t> lines;
  const bool older = header_of(text) == kOlderHeader;
  check_header(text, file, older ? kOlderHeader : kHeader);
  read_records(text, file, [&](const CsvRecord& record) {
    rows.push_back(RowParser(record.fields).parse());
    lines.push_back(record.line);
  });
  refuse_duplicates(rows, lines, file);
  return rows;
}

std::string blocks_csv(std::span<const ResultRow> rows) {
  std::string text = fmt::format("{}\n", kBlockHeader);
  for (const ResultRow& row : rows)
    for (std::size_t b = 0; b < row.blocks.size(); ++b)
      text += fmt::format("{},{},{},{}\n", block_key(row), b, number_field(row.blocks[b]),
                          row.block_weights.empty() ? 1 : row.block_weights[b]);
  return text;
}

void parse_blocks_csv(std::string_view text, std::string_view file, std::span<ResultRow> rows) {
  std::map<std::string, ResultRow*> known;
  for (ResultRow& row : rows)
    if (row.layer < 0) known[block_key(row)] = &row;
  check_header(text, file, kBlockHeader);
  read_records(text, file, [&](const CsvRecord& record) {
    const std::vector<std::string>& fields = record.fields;
    std::string key;
    for (std::size_t i = 0; i < 8; ++i) {
      if (i > 0) key += ',';
      key += csv_field(fields[i]);
    }
    const auto found = known.find(key);
    if (found == known.end())
      throw std::runtime_error(
          "the block belongs to no row of results.csv; there should be a row for the whole model");
    ResultRow& row = *found->second;
    if (csv_number<std::uint64_t>(fields[8], "block") != row.blocks.size())
      throw std::runtime_error(
          fmt::format("block {} should be {}; each block appears once, in order",
                      shown_field(fields[8]), row.blocks.size()));
    row.blocks.push_back(fields[9].empty() ? std::numeric_limits<double>::quiet_NaN()
                                           : csv_number<double>(fields[9], "value"));
    row.block_weights.push_back(csv_number<double>(fields[10], "weight"));
    if (row.block_weights.back() < 0) throw std::runtime_error("weight is negative");
  });
}

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

namespace {

using Rename = std::string (*)(std::string_view);

/// The function that converts old names in the fields of `column` to current names; null if the
/// names in this column have never changed.
Rename renamed_fields(std::string_view column) {
  if (column == "policy") return current_policy;
  if (column == "params") return current_params;
  if (column == "metric") return current_metric;
  return nullptr;
}

}  // namespace

void read_records(std::string_view text, std::string_view file,
                  const std::function<void(const CsvRecord&)>& read) {
  CsvReader reader(text);
  try {
    CsvRecord record{.header = reader.next().value_or(std::vector<std::string>{})};
    for (std::string& column : record.header) column = current_name(kOldColumns, column);
    while (auto fields = reader.next()) try {
        if (fields->size() != record.header.size())
          throw std::runtime_error(
              fmt::format("{} columns; there should be {}", fields->size(), record.header.size()));
        record.fields = std::move(*fields);
        record.line = reader.line();
        for (std::size_t i = 0; i < record.fields.size(); ++i)
          if (const auto rename = renamed_fields(record.header[i]))
            record.fields[i] = rename(record.fields[i]);
        read(record);
      } catch (const std::exception& error) {
        throw std::runtime_error(fmt::format("line {}: {}", reader.line(), error.what()));
      }
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(fmt::format("{}: {}", file, error.what()));
  }
}

}  // namespace kvlab
