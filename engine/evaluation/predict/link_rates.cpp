#include "engine/evaluation/predict/link_rates.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxLinkBytes = 1 << 20, kMaxFetches = 4096;
constexpr double kMinRate = 1e3, kMaxRate = 1e18, kMaxMicroseconds = 1e9;
constexpr std::uint32_t kMaxRows = 1u << 30, kMaxRowBytes = 1 << 20;

double seconds_at(const FetchCurve& curve, double rows) {
  const auto& points = curve.points;
  const auto above = std::ranges::lower_bound(points, rows, {}, &FetchCurve::Point::rows);
  if (above == points.begin()) return points.front().seconds;
  const auto end = above == points.end() ? above - 1 : above, begin = end - 1;
  return begin->seconds +
         (end->seconds - begin->seconds) * (rows - begin->rows) / (end->rows - begin->rows);
}

/// Makes the times ascend: each point gets at least the time of the points before it. Measured
/// times vary by a few percent, so a larger number of rows may have been measured as faster.
FetchCurve curve_of(double row_bytes, double launch_seconds,
                    const std::map<double, double>& times) {
  FetchCurve curve{row_bytes, {{0, launch_seconds}}};
  for (const auto& [rows, seconds] : times)
    curve.points.push_back({rows, std::max(seconds, curve.points.back().seconds)});
  return curve;
}

}  // namespace

double LinkRates::fetch_seconds(double rows, double row_bytes) const {
  const auto above = std::ranges::lower_bound(curves, row_bytes, {}, &FetchCurve::row_bytes);
  if (above == curves.begin()) return seconds_at(*above, rows);
  if (above == curves.end()) {
    const FetchCurve& last = curves.back();
    return seconds_at(last, rows * row_bytes / last.row_bytes);
  }
  const FetchCurve &small = *(above - 1), &large = *above;
  const double share = (row_bytes - small.row_bytes) / (large.row_bytes - small.row_bytes);
  return (1 - share) * seconds_at(small, rows) + share * seconds_at(large, rows);
}

LinkRates parse_link(const nlohmann::json& json, const std::string& where) {
  const JsonFields fields(json, where);
  if (!fields.has("bench") || fields.value("bench") != "link")
    fields.refuse("bench", "the output of `kvlab bench link --json` is expected");
  fields.check_format(kLinkFormat);
  LinkRates link{
      .device = fields.text("device"),
      .read_bytes_per_second = fields.number("read_bytes_per_second", kMinRate, kMaxRate),
      .copy_bytes_per_second = fields.number("copy_bytes_per_second", kMinRate, kMaxRate),
      .curves = {}};
  constexpr double kMicrosecond = 1e-6;
  const double launch = fields.number("launch_microseconds", 0, kMaxMicroseconds) * kMicrosecond;
  const std::vector<JsonFields> fetches = fields.objects("fetches");
  if (fetches.empty() || fetches.size() > kMaxFetches)
    fields.refuse("fetches", fmt::format("1 to {} objects are expected", kMaxFetches));
  std::map<double, std::map<double, double>> times;  // [row bytes][rows]
  for (const JsonFields& fetch : fetches) {
    const bool is_new =
        times[fetch.size("row_bytes", kMaxRowBytes)]
            .emplace(fetch.size("rows", kMaxRows),
                     fetch.number("microseconds", 0, kMaxMicroseconds) * kMicrosecond)
            .second;
    if (!is_new) fetch.refuse("rows", "this number of rows of this size is listed twice");
  }
  for (const auto& [row_bytes, by_rows] : times)
    link.curves.push_back(curve_of(row_bytes, launch, by_rows));
  return link;
}

LinkRates read_link_file(const std::string& path) {
  return parse_link(parse_json(read_text_file(path, kMaxLinkBytes), path), path);
}

}  // namespace kvlab
