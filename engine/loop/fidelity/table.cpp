#include "engine/loop/fidelity/table.hpp"

#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <optional>
#include <set>
#include <stdexcept>

#include "engine/loop/eval/table.hpp"
#include "policies/catalogue.hpp"
#include "sim/run/csv.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMostMisordered = 10;  // shown, of each metric and budget
constexpr std::size_t kMostTableBytes = std::size_t{64} << 20;

ordered_json wrong_json(const FidelityBudget& budget, std::span<const CacheConfig> configs) {
  ordered_json list = ordered_json::array();
  for (const Misordered& wrong : budget.misordered) {
    if (list.size() == kMostMisordered) break;
    list.push_back({{"preferred", configs[wrong.preferred].policy.text()},
                    {"better", configs[wrong.better].policy.text()},
                    {"kl_ratio", wrong.ratio}});
  }
  return list;
}

ordered_json metric_json(const FidelityMetric& metric, std::span<const CacheConfig> configs) {
  ordered_json object = {{"within", {}},
                         {"within_low", {}},
                         {"within_high", {}},
                         {"single_text", {}},
                         {"pooled", number_or_null(metric.pooled)},
                         {"regret", {}},
                         {"worst_regret", {}},
                         {"chosen", {}},
                         {"best", {}},
                         {"told_apart", {}},
                         {"misordered", {}},
                         {"wrong", {}}};
  for (const FidelityBudget& budget : metric.within) {
    object["within"][budget.budget] = number_or_null(budget.rho);
    object["within_low"][budget.budget] = number_or_null(budget.rho_interval.low);
    object["within_high"][budget.budget] = number_or_null(budget.rho_interval.high);
    object["single_text"][budget.budget] = number_or_null(budget.rho_single);
    object["regret"][budget.budget] = number_or_null(budget.regret);
    object["worst_regret"][budget.budget] = number_or_null(budget.worst_regret);
    object["chosen"][budget.budget] = configs[budget.chosen].policy.text();
    object["best"][budget.budget] = configs[budget.best].policy.text();
    object["told_apart"][budget.budget] = budget.told_apart;
    object["misordered"][budget.budget] = budget.misordered.size();
    object["wrong"][budget.budget] = wrong_json(budget, configs);
  }
  return object;
}

/// Tokens of a budget as asked for, a mean where heads share it, in texts of so many tokens by
/// their names; none of bytes, or of budgets in a file. Throws std::runtime_error for a share of
/// texts that differ in length.
std::optional<double> tokens_of(const std::string& budget, const JsonFields& tokens) {
  if (budget.starts_with('@')) return std::nullopt;
  Budget asked;
  try {
    asked = parse_budget(budget);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", tokens.where(), error.what()));
  }
  if (asked.bytes > 0) return std::nullopt;
  if (!asked.extent.is_share) return asked.extent.tokens;
  std::set<std::uint64_t> lengths;
  for (const auto& [text, length] : tokens.json().items()) lengths.insert(tokens.whole(text));
  if (lengths.size() != 1)
    throw std::runtime_error(fmt::format(
        "{}: {} are of {} lengths, so that {} is no number of tokens; measure texts of one length, "
        "or budgets in tokens",
        tokens.where(), tokens.json().size(), lengths.size(), budget));
  return static_cast<double>(*lengths.begin()) * asked.extent.share_ppm / 1e6;
}

/// A rank correlation.
std::optional<double> optional_rho(const JsonFields& fields, const std::string& key) {
  return fields.has(key) ? std::optional(fields.number(key, -1, 1)) : std::nullopt;
}
std::optional<double> optional_regret(const JsonFields& fields, const std::string& key) {
  constexpr double kMost = 1e9;
  return fields.has(key) ? std::optional(fields.number(key, 0, kMost)) : std::nullopt;
}

nlohmann::json or_null(const std::optional<double>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

}  // namespace

std::string fidelity_csv(std::span<const CacheConfig> configs, std::span<const FidelityText> texts,
                         std::uint32_t head_size) {
  std::string csv = fmt::format("text,{},metric,value\n", kConfigColumns);
  const auto add = [&](const FidelityText& text, std::size_t c, const std::string& metric,
                       double value) {
    if (std::isfinite(value))
      csv +=
          fmt::format("{},{},{},{}\n", csv_field(text.name),
                      config_columns(configs[c], configs[c].budget.resolve(text.tokens, head_size)),
                      metric, value);
  };
  for (const FidelityText& text : texts)
    for (std::size_t c = 0; c < configs.size(); ++c) {
      add(text, c, "kl", text.kl[c]);
      for (const auto& [metric, values] : text.figures) add(text, c, metric, values[c]);
    }
  return csv;
}

void add_fidelity(ordered_json& object, const Fidelity& fidelity,
                  std::span<const CacheConfig> configs, std::span<const FidelityText> texts) {
  object["texts"] = ordered_json::array();
  for (const FidelityText& text : texts) {
    object["texts"].push_back(text.name);
    object["tokens"][text.name] = text.tokens;
    object["prompt_tokens"][text.name] = text.prompt_tokens;
  }
  object["default_metric"] = fidelity.standard;
  for (const FidelityMetric& metric : fidelity.metrics)
    object["metrics"][metric.metric] = metric_json(metric, configs);
  for (std::size_t b = 0; b < fidelity.ceiling.size(); ++b)
    object["ceiling"][fidelity.metrics.front().within[b].budget] =
        number_or_null(fidelity.ceiling[b]);
}

nlohmann::json fidelity_evidence(const std::filesystem::path& file, const std::string& metric,
                                 std::uint32_t budget_tokens, const std::string& weights_xxh3) {
  const std::string text = read_text_file(file, kMostTableBytes);
  const nlohmann::json top = parse_json(text, file.string());
  const JsonFields fields(top, file.string());
  fields.check_format(kFidelityFormat);
  if (fields.text("weights_xxh3") != weights_xxh3)
    throw std::runtime_error(fmt::format(
        "{}: was measured on other weights ({}, of {}) than the run's ({})", file.string(),
        fields.text("weights_xxh3"), fields.text("model"), weights_xxh3));
  const JsonFields metrics = fields.object("metrics");
  if (!metrics.has(metric))
    throw std::runtime_error(fmt::format(
        "{}: did not measure {}, which decides here; give --metric", file.string(), metric));
  const JsonFields own = metrics.object(metric), within = own.object("within");
  const JsonFields tokens = fields.object("tokens");
  std::string nearest;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [budget, value] : within.json().items()) {
    const auto count = tokens_of(budget, tokens);
    const double apart =
        count ? std::abs(std::log(*count / static_cast<double>(budget_tokens))) : least;
    if (apart < least) least = apart, nearest = budget;
  }
  if (nearest.empty())
    throw std::runtime_error(own.where() + ": key 'within' has no budget in tokens or a share");
  return {{"metric", metric},
          {"budget", nearest},
          {"rho", or_null(optional_rho(within, nearest))},
          {"rho_low", or_null(optional_rho(own.object("within_low"), nearest))},
          {"rho_high", or_null(optional_rho(own.object("within_high"), nearest))},
          {"regret", or_null(optional_regret(own.object("regret"), nearest))},
          {"pooled", or_null(optional_rho(own, "pooled"))},
          {"texts", fields.list("texts").size()},
          {"tokens", tokens.json()},
          {"file_xxh3", xxh3_hex(text)}};
}

std::string evidence_text(const nlohmann::json& evidence) {
  const auto number = [&](const char* key) {
    return evidence[key].is_number() ? fmt::format("{:.2f}", evidence[key].get<double>())
                                     : std::string("unknown");
  };
  return fmt::format(
      "{} orders policies as the closed loop does with rho {} ({} to {}) at a budget of {}, regret "
      "{}; measured on {} texts",
      evidence["metric"].get<std::string>(), number("rho"), number("rho_low"), number("rho_high"),
      evidence["budget"].get<std::string>(), number("regret"),
      evidence["texts"].get<std::size_t>());
}

}  // namespace kvlab
