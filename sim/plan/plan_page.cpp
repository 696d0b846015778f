#include "sim/plan/plan_page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <vector>

#include "policies/tiers/tier_plan.hpp"
#include "sim/plan/format_plan.hpp"
#include "sim/report/figure.hpp"
#include "sim/report/text.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kFormatColours[] = {"blue",   "green", "orange", "vermilion",
                                               "purple", "wine",  "olive",  "brown"};

SeriesStyle style_of(std::size_t format) {
  return {kFormatColours[format % std::size(kFormatColours)],
          {},
          "circle",
          format < std::size(kFormatColours)};
}

/// A choice of formats as the plan file stores it.
struct Choice {
  std::string tiers;
  double bits, sum, joint, error, measured, measured_error;  ///< NaN if unknown
};

class PlanPage {
 public:
  PlanPage(const nlohmann::json& top, const std::string& path)
      : path_(path),
        file_(top, path),
        plan_(choice_in("plan")),
        uniform_(choice_in("uniform")),
        losses_(file_.objects("losses")) {
    const PlanFile plan = plan_file_of(top, path);
    layers_ = plan.layers;
    centre_ = plan.centre;
    if (losses_.size() != layers_.size())
      file_.refuse("losses", "the losses of each layer of the plan are expected");
    const JsonFields keys = losses_.front().object("keys");
    for (const auto& [name, loss] : keys.json().items()) {
      const RowFormat* const format = find_row_format(name);
      if (!format) losses_.front().refuse("keys", "names of storage formats are expected");
      formats_.push_back(format);
    }
    std::ranges::sort(formats_);  // pointers into one table, in order of decreasing precision
    by_layer_ = formats_of(plan_.tiers);
  }

  PageDocument document() const {
    const Choice& chosen = is_plan() ? plan_ : uniform_;
    ordered_json data{{"kind", "plan"},
                      {"facts",
                       {{"model", file_.object("model").text("name")},
                        {"weights_xxh3", file_.object("model").text("weights_xxh3")},
                        {"metric", file_.text("metric")},
                        {"centre", file_.text("centre")},
                        {"is_plan", is_plan()},
                        {"layers", layer_rows()},
                        {"plan", json_of(plan_)},
                        {"uniform", json_of(uniform_)},
                        {"next", next()}}}};
    add_figures(data, {bits_figure(), loss_figure(0), loss_figure(1)});
    return {std::move(data),
            fmt::format("{}: {} at {:.2f} bits per element\n", path_, chosen.tiers, chosen.bits)};
  }

 private:
  Choice choice_in(const char* key) const {
    const JsonFields own = file_.object(key);
    return {own.text("tiers"),
            own.number("bits", 0, 16),
            own.number("sum_of_losses", 0),
            own.number_or_nan("loss"),
            own.number_or_nan("stderr"),
            own.number_or_nan("measured_kl"),
            own.number_or_nan("measured_kl_stderr")};
  }

  /// Whether the choice in the file is the plan by layer, and not the one format for all layers.
  bool is_plan() const { return file_.text("tiers") == plan_.tiers; }

  std::vector<KvFormat> formats_of(const std::string& tiers) const {
    const TierPlan plan = parse_tier_plan(tiers);
    if (plan.is_by_layer()) {
      if (plan.layers.size() != layers_.size())
        file_.refuse("plan", "a format for each layer of the plan is expected");
      return plan.layers;
    }
    return std::vector<KvFormat>(layers_.size(), plan.tiers.front().format);
  }

  static ordered_json json_of(const Choice& choice) {
    return {{"tiers", choice.tiers},
            {"bits", choice.bits},
            {"sum_of_losses", choice.sum},
            {"joint", number_or_null(choice.joint)},
            {"joint_error", number_or_null(choice.error)},
            {"measured_kl", number_or_null(choice.measured)},
            {"measured_kl_error", number_or_null(choice.measured_error)}};
  }

  /// The loss of the keys (part 0) or values (part 1) of a layer in a format.
  double loss(std::size_t layer, std::size_t part, const RowFormat& format) const {
    return losses_[layer].object(part == 0 ? "keys" : "values").number(format.name, 0);
  }

  /// Returns a row for each group of consecutive layers with the same format, with the group's
  /// share of the sum of losses.
  ordered_json layer_rows() const {
    ordered_json rows = ordered_json::array();
    for (std::size_t begin = 0, end; begin < layers_.size(); begin = end) {
      const KvFormat& format = by_layer_[begin];
      double sum[2] = {0, 0};
      for (end = begin; end < layers_.size() && by_layer_[end] == format; ++end)
        for (std::size_t part = 0; part < 2; ++part)
          sum[part] += loss(end, part, part == 0 ? *format.key : *format.value);
      rows.push_back({{"from", layers_[begin]},
                      {"to", layers_[end - 1]},
                      {"keys", format.key->name},
                      {"values", format.value->name},
                      {"bits", format.bits()},
                      {"key_loss", sum[0]},
                      {"value_loss", sum[1]}});
    }
    return rows;
  }

  std::string next() const {
    const std::string centre =
        centre_ == KeyCentre::none ? "" : fmt::format(" --centre {}", centre_.text());
    if (std::isnan(plan_.measured))
      return fmt::format("kvlab eval --model DIR --text OTHER --policy full --tiers @{}{}", path_,
                         centre);
    return fmt::format("kvlab generate --model DIR --prompt TEXT --policy full --tiers @{}{}",
                       path_, centre);
  }

  /// Sum of losses against bits: the best plans, and each format in all layers.
  Figure bits_figure() const {
    Figure figure{
        .name = "bits",
        .title = "expected loss against bits",
        .x = {.title = "bits per element of keys and values"},
        .y = {.title = fmt::format("sum of {}", file_.text("metric")), .logarithmic = true}};
    FigureSeries plans{"best plan of its size", {"blue", {}, "circle", true}, {}};
    for (const JsonFields& one : file_.objects("frontier"))
      if (const double bits = one.number("bits", 0, 16); bits < 16)
        plans.points.push_back({.x = bits, .y = one.number("sum_of_losses", 0)});
    FigureSeries same{"one format in all layers", {"orange", {4, 3}, "square", true}, {}};
    for (const RowFormat* format : formats_)
      if (!format->exact()) same.points.push_back(uniform_point(*format));
    std::ranges::sort(same.points, {}, &FigurePoint::x);
    FigureSeries chosen{"this plan", {"vermilion", {}, "diamond", false}, {}};
    chosen.points.push_back({.x = plan_.bits, .y = plan_.sum});
    figure.series = {std::move(plans), std::move(same), std::move(chosen)};
    return figure;
  }

  FigurePoint uniform_point(const RowFormat& format) const {
    double sum = 0;
    for (std::size_t layer = 0; layer < layers_.size(); ++layer)
      sum += loss(layer, 0, format) + loss(layer, 1, format);
    return {.x = KvFormat{&format, &format}.bits(), .y = sum, .note = std::string(format.name)};
  }

  /// The loss of each layer's keys or values alone, in each format.
  Figure loss_figure(std::size_t part) const {
    Figure figure{.name = part == 0 ? "keys" : "values",
                  .title = part == 0 ? "keys of one layer" : "values of one layer",
                  .x = {.title = "layer"},
                  .y = {.title = file_.text("metric"), .logarithmic = true},
                  .joined = false};
    figure.x.ticks.assign(layers_.begin(), layers_.end());
    for (std::size_t f = 0; f < formats_.size(); ++f) {
      if (formats_[f]->exact()) continue;
      FigureSeries series{std::string(formats_[f]->name), style_of(f), {}};
      for (std::size_t layer = 0; layer < layers_.size(); ++layer)
        series.points.push_back(
            {.x = static_cast<double>(layers_[layer]), .y = loss(layer, part, *formats_[f])});
      figure.series.push_back(std::move(series));
    }
    FigureSeries chosen{"chosen by the plan", {"ink", {}, "diamond", false}, {}};
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
      const RowFormat& format = part == 0 ? *by_layer_[layer].key : *by_layer_[layer].value;
      if (format.exact()) continue;
      chosen.points.push_back({.x = static_cast<double>(layers_[layer]),
                               .y = loss(layer, part, format),
                               .note = std::string(format.name)});
    }
    if (!chosen.points.empty()) figure.series.push_back(std::move(chosen));
    return figure;
  }

  std::string path_;
  JsonFields file_;
  Choice plan_, uniform_;
  std::vector<JsonFields> losses_;
  std::vector<std::uint32_t> layers_;
  CentreSetting centre_;
  std::vector<const RowFormat*> formats_;
  std::vector<KvFormat> by_layer_;  // [layer]: formats of the plan
};

}  // namespace

bool is_plan_file(const nlohmann::json& top) {
  return top.is_object() && top.contains("frontier") && top.contains("losses");
}

PageDocument plan_page(const nlohmann::json& top, const std::string& path) {
  return PlanPage(top, path).document();
}

}  // namespace kvlab
