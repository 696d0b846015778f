#include "sim/calibration.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/manifest.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr int kFormat = 1;
constexpr std::size_t kMostCalibrationBytes = std::size_t{64} << 20;

/// A list by layer of lists by query head.
json lists_of(const std::vector<double>& values, std::uint32_t query_heads) {
  json lists = json::array();
  for (std::size_t first = 0; first < values.size(); first += query_heads)
    lists.push_back(
        std::vector<double>(values.begin() + static_cast<std::ptrdiff_t>(first),
                            values.begin() + static_cast<std::ptrdiff_t>(first + query_heads)));
  return lists;
}

std::vector<double> values_of(const JsonFields& fields, std::string_view key,
                              const Calibration& calibration) {
  std::vector<double> values;
  constexpr double kMost = 1e30;  // sums of squares stay finite
  const std::string right = fmt::format("{} lists of {} numbers from 0 to {:g} are expected",
                                        calibration.layers, calibration.query_heads, kMost);
  const auto refuse = [&] {
    throw std::runtime_error(fmt::format("{}: \"{}\": {}", fields.where(), key, right));
  };
  if (fields.list(key).size() != calibration.layers) refuse();
  for (const json& layer : fields.list(key)) {
    if (!layer.is_array() || layer.size() != calibration.query_heads) refuse();
    for (const json& value : layer) {
      if (!value.is_number() || !(value.get<double>() >= 0 && value.get<double>() <= kMost))
        refuse();
      values.push_back(value);
    }
  }
  return values;
}

}  // namespace

std::string calibration_text(const Calibration& calibration) {
  const json object{{"format", kFormat},
                    {"model", calibration.model},
                    {"weights_xxh3", calibration.weights_xxh3},
                    {"layers", calibration.layers},
                    {"query_heads", calibration.query_heads},
                    {"sensitivity", lists_of(calibration.sensitivity, calibration.query_heads)},
                    {"stderr", lists_of(calibration.standard_error, calibration.query_heads)},
                    {"measured", *calibration.measured}};
  return json_text(object, 1) + "\n";
}

Calibration read_calibration(const std::filesystem::path& path) {
  const std::string text = read_text_file(path, kMostCalibrationBytes);
  const json object = parse_json(text, path.string());
  const JsonFields fields(object, path.string());
  fields.check_format(kFormat);
  fields.allow_only({"format", "model", "weights_xxh3", "layers", "query_heads", "sensitivity",
                     "stderr", "measured"});
  Calibration calibration{.model = fields.text("model"),
                          .weights_xxh3 = fields.text("weights_xxh3"),
                          .layers = fields.size("layers", kMaxLayers),
                          .query_heads = fields.size("query_heads", kMaxHeads)};
  calibration.sensitivity = values_of(fields, "sensitivity", calibration);
  calibration.standard_error = values_of(fields, "stderr", calibration);
  calibration.measured = fields.any("measured");
  calibration.path = path.string();
  calibration.xxh3 = xxh3_hex(text);
  return calibration;
}

void check_calibration(const Calibration& calibration, const TraceReader& trace) {
  const TraceHeader& header = trace.header();
  const bool is_same = !header.weights_xxh3.empty() &&
                       header.weights_xxh3 == calibration.weights_xxh3 &&
                       header.shape.layers == calibration.layers &&
                       header.shape.query_heads == calibration.query_heads;
  if (is_same) return;
  throw std::invalid_argument(fmt::format(
      "--calibration: {} is of the model {} with weights {}; the trace {} is of {} with weights "
      "{}: `kvlab calibrate` makes one of that model",
      calibration.path, calibration.model, calibration.weights_xxh3, trace.directory().string(),
      header.model, header.weights_xxh3.empty() ? "that it does not name" : header.weights_xxh3));
}

}  // namespace kvlab
