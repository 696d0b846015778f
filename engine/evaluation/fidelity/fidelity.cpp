#include "engine/evaluation/fidelity/fidelity.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>

#include "engine/evaluation/eval/score.hpp"
#include "policies/catalogue.hpp"
#include "policies/features/features.hpp"
#include "sim/run/overlap.hpp"
#include "sim/run/results.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/numeric/nan.hpp"
#include "traces/base/work_plan.hpp"

namespace kvlab {
namespace {

using Values = std::vector<double>;

double mean_of_finite(const Values& values) {
  double sum = 0, count = 0;
  for (const double value : values)
    if (std::isfinite(value)) sum += value, ++count;
  return count > 0 ? sum / count : kNaN;
}

/// A text's values of a metric, with the sign changed if needed so that lower is better.
Values cost_of(const FidelityText& text, const std::string& metric) {
  Values values = text.replay_metrics.at(metric);
  if (find_metric(metric)->higher_is_better)
    for (double& value : values) value = -value;
  return values;
}

/// The mean of values [text][configuration] over some texts.
Values mean_over(const std::vector<Values>& values, std::span<const std::size_t> texts) {
  Values mean(values.front().size());
  for (const std::size_t text : texts)
    for (std::size_t c = 0; c < mean.size(); ++c)
      mean[c] += values[text][c] / static_cast<double>(texts.size());
  return mean;
}

Values pick(const Values& values, std::span<const std::size_t> which) {
  Values some;
  for (const std::size_t c : which) some.push_back(values[c]);
  return some;
}

struct Choice {
  std::size_t chosen, best;
  double regret;
};
Choice choice_of(const Values& cost, const Values& kl, std::span<const std::size_t> which) {
  const auto find_lowest = [&](const Values& values) {
    return *std::min_element(which.begin(), which.end(),
                             [&](std::size_t a, std::size_t b) { return values[a] < values[b]; });
  };
  const std::size_t chosen = find_lowest(cost), best = find_lowest(kl);
  return {chosen, best, kl[chosen] / kl[best]};
}

struct BudgetGroup {
  std::string budget;
  std::vector<std::size_t> configs;
};
std::vector<BudgetGroup> by_budget(std::span<const CacheConfig> configs) {
  std::vector<BudgetGroup> groups;
  for (std::size_t c = 0; c < configs.size(); ++c) {
    const std::string budget = configs[c].budget.text();
    auto found = std::find_if(groups.begin(), groups.end(),
                              [&](const BudgetGroup& group) { return group.budget == budget; });
    if (found == groups.end()) found = groups.insert(found, BudgetGroup{budget, {}});
    found->configs.push_back(c);
  }
  for (const BudgetGroup& group : groups)
    if (group.configs.size() < 3)
      throw std::invalid_argument(
          fmt::format("budget {}: {} policies are too few to compare their order; give at least 3",
                      group.budget, group.configs.size()));
  return groups;
}

/// The pairs of a budget's configurations that differ significantly in KL: [better, worse].
using Apart = std::vector<std::pair<std::size_t, std::size_t>>;
Apart pairs_apart(std::span<const FidelityText> texts, const BudgetGroup& group) {
  PairedScores kl(group.configs.size());
  for (const FidelityText& text : texts) {
    std::vector<std::span<const double>> scores;
    for (const std::size_t c : group.configs) scores.emplace_back(text.kl_tokens[c]);
    kl.add_tokens(std::to_string(&text - texts.data()), scores);
  }
  Apart apart;
  for (std::size_t a = 0; a < group.configs.size(); ++a)
    for (std::size_t b = 0; b < group.configs.size(); ++b)
      if (a != b && kl.difference(a, b).ahead())
        apart.emplace_back(group.configs[a], group.configs[b]);
  return apart;
}

/// Compares one metric with KL over the same texts.
class MetricAgainstKl {
 public:
  MetricAgainstKl(std::span<const FidelityText> texts, const std::string& metric) {
    for (const FidelityText& text : texts) {
      kl_.push_back(text.kl);
      cost_.push_back(cost_of(text, metric));
      all_.push_back(all_.size());
    }
  }

  FidelityBudget within(const std::string& budget, std::span<const std::size_t> which) const {
    const Choice choice = choice_of(mean_over(cost_, all_), mean_over(kl_, all_), which);
    FidelityBudget result{.budget = budget,
                          .rho = rho(all_, which),
                          .rho_single = kNaN,
                          .regret = choice.regret,
                          .worst_regret = 0,
                          .chosen = choice.chosen,
                          .best = choice.best,
                          .significantly_different = 0};
    Values single;
    for (const std::size_t text : all_) {
      single.push_back(rho(std::span(&text, 1), which));
      result.worst_regret =
          std::max(result.worst_regret, choice_of(cost_[text], kl_[text], which).regret);
    }
    result.rho_single = mean_of_finite(single);
    result.rho_interval = bootstrap(
        all_.size(), [&](std::span<const std::size_t> texts) { return rho(texts, which); });
    return result;
  }
  double pool_rho(std::span<const std::size_t> which) const { return rho(all_, which); }

  /// The pairs that differ significantly in KL and that the metric puts in the wrong order.
  std::vector<Misordered> find_misordered(const Apart& apart) const {
    const Values cost = mean_over(cost_, all_), kl = mean_over(kl_, all_);
    std::vector<Misordered> wrong;
    for (const auto& [better, worse] : apart)
      if (cost[worse] < cost[better]) wrong.push_back({worse, better, kl[worse] / kl[better]});
    std::ranges::stable_sort(wrong, std::greater<>{}, &Misordered::ratio);
    return wrong;
  }

 private:
  double rho(std::span<const std::size_t> texts, std::span<const std::size_t> which) const {
    return spearman(pick(mean_over(cost_, texts), which), pick(mean_over(kl_, texts), which));
  }
  std::vector<Values> kl_, cost_;  // [text][configuration]
  std::vector<std::size_t> all_;   // indices of all texts
};

/// The metrics that every text has.
std::vector<std::string> common_metrics(std::span<const FidelityText> texts) {
  std::vector<std::string> names;
  for (const auto& entry : texts.front().replay_metrics)
    if (find_metric(entry.first)->ranks &&
        std::ranges::all_of(texts, [&](const FidelityText& text) {
          return text.replay_metrics.contains(entry.first);
        }))
      names.push_back(entry.first);
  return names;
}

}  // namespace

void check_fidelity_sweep(std::span<const CacheConfig> configs) {
  for (const CacheConfig& config : configs)
    if (!config.evicts())
      throw std::invalid_argument(
          fmt::format("--policy: {} never evicts, so there is nothing to predict; leave it out",
                      config.policy.text()));
  if (std::ranges::any_of(configs, [](const CacheConfig& config) { return config.budget.all; }))
    throw std::invalid_argument(
        "--budget: all keeps every token, so there is nothing to predict; give tokens or a share");
  by_budget(configs);
}

FidelityText fidelity_text(const EvalText& text, std::vector<std::vector<double>> kl_tokens,
                           ReplayMetrics replay_metrics) {
  FidelityText result{.name = text.name,
                      .tokens = static_cast<std::uint32_t>(text.ids.size()),
                      .prompt_tokens = text.prompt_tokens,
                      .kl_tokens = std::move(kl_tokens),
                      .replay_metrics = std::move(replay_metrics)};
  for (const Values& tokens : result.kl_tokens) result.kl.push_back(spread_of(tokens).mean);
  return result;
}

std::string default_metric(std::span<const ReplayMetrics> replay_metrics) {
  return std::string(best_metric([&](const std::string& metric) {
    return std::ranges::all_of(replay_metrics,
                               [&](const auto& text) { return text.contains(metric); });
  }));
}

const FidelityMetric* Fidelity::find(const std::string& metric) const {
  const auto found = std::ranges::find(metrics, metric, &FidelityMetric::metric);
  return found == metrics.end() ? nullptr : &*found;
}

Fidelity assess_fidelity(std::span<const CacheConfig> configs,
                         std::span<const FidelityText> texts) {
  const std::vector<BudgetGroup> budgets = by_budget(configs);
  std::vector<Apart> apart;
  for (const BudgetGroup& group : budgets) apart.push_back(pairs_apart(texts, group));
  std::vector<std::size_t> everything(configs.size());
  std::iota(everything.begin(), everything.end(), std::size_t{0});
  Fidelity result;
  for (const std::string& metric : common_metrics(texts)) {
    const MetricAgainstKl comparison(texts, metric);
    FidelityMetric own{metric, {}, comparison.pool_rho(everything)};
    for (std::size_t b = 0; b < budgets.size(); ++b) {
      own.within.push_back(comparison.within(budgets[b].budget, budgets[b].configs));
      own.within.back().significantly_different = apart[b].size();
      own.within.back().misordered = comparison.find_misordered(apart[b]);
    }
    result.metrics.push_back(std::move(own));
  }
  std::vector<ReplayMetrics> replay_metrics;
  for (const FidelityText& text : texts) replay_metrics.push_back(text.replay_metrics);
  result.standard = default_metric(replay_metrics);
  for (const BudgetGroup& group : budgets) {
    Values pairs;
    for (std::size_t a = 0; a < texts.size(); ++a)
      for (std::size_t b = a + 1; b < texts.size(); ++b)
        pairs.push_back(
            spearman(pick(texts[a].kl, group.configs), pick(texts[b].kl, group.configs)));
    result.ceiling.push_back(mean_of_finite(pairs));
  }
  return result;
}

namespace {

TraceReader capture(Backend& backend, const EvalText& text, const OfflineReplayOptions& options) {
  TraceWriter writer(options.capture, backend.trace_header({{"teacher_forced", true}}));
  writer.sketch(options.sketch);
  const auto decoder = backend.capturing_decoder(
      ResolvedConfig{}, static_cast<std::uint32_t>(text.ids.size()), writer,
      [&](std::uint32_t tokens) {
        if (options.capturing)
          options.capturing(static_cast<double>(tokens) / static_cast<double>(text.ids.size()));
      });
  const std::span all(text.ids);
  decoder->feed(all.first(text.prompt_tokens), SegmentKind::prompt);
  decoder->feed(all.subspan(text.prompt_tokens), SegmentKind::decode);
  decoder->flush();
  writer.finish();
  return TraceReader::open(options.capture);
}

}  // namespace

EvalText text_of_trace(const std::filesystem::path& directory, const std::string& weights_xxh3,
                       unsigned threads) {
  TraceReader trace = open_verified_trace(directory, threads);
  const std::string where = directory.string();
  if (trace.header().weights_xxh3 != weights_xxh3)
    throw std::runtime_error(fmt::format(
        "--trace {}: was captured from weights {}, but --model has {}; give a trace of this model",
        where, trace.header().weights_xxh3.empty() ? "unknown" : trace.header().weights_xxh3,
        weights_xxh3));
  const auto& segments = trace.segments();
  if (segments.size() != 2 || segments[0].kind != SegmentKind::prompt || segments[1].tokens < 2)
    throw std::runtime_error(
        fmt::format("--trace {}: should have one prompt, then at least two decoded tokens", where));
  EvalText text{.name = last_name(where), .ids = trace.ids(), .prompt_tokens = segments[0].tokens};
  text.trace = std::move(trace);
  return text;
}

DistinctTexts distinct_texts(std::vector<EvalText> texts) {
  std::vector<TextPiece> pieces;
  std::vector<std::string> names;
  for (const EvalText& text : texts) {
    pieces.push_back({.text = pieces.size(), .ids = text.ids, .first_scored = text.prompt_tokens});
    names.push_back(text.name);
  }
  const Overlaps overlaps = overlaps_of(pieces);
  DistinctTexts distinct{.warnings = overlap_warnings(overlaps, names)};
  for (std::size_t t = 0; t < texts.size(); ++t)
    if (!overlaps.repeats[t]) distinct.texts.push_back(std::move(texts[t]));
  return distinct;
}

ReplayMetrics run_offline_replay(Backend& backend, const EvalText& text,
                                 std::span<const CacheConfig> configs,
                                 const OfflineReplayOptions& options) {
  std::optional<TraceReader> captured;
  if (!text.trace) captured = capture(backend, text, options);
  const bool wants_output = std::ranges::any_of(
      configs, [](const CacheConfig& config) { return wants_projections(config.policy.features); });
  const ReplayResult replayed =
      replay(captured ? *captured : *text.trace, 0, configs,
             {.every_output_error = options.every_output_error,
              .elsewhere = options.device,
              .output = wants_output ? backend.output_projections() : nullptr,
              .threads = options.threads,
              .progress = options.progress});
  ReplayMetrics replay_metrics;
  for (const Measurement& row : replayed.measurements) {
    if (row.layer >= 0) continue;
    const MetricInfo* const metric = find_metric(row.metric);
    if (!metric || !(metric->ranks || row.metric.starts_with("kv_bytes_"))) continue;
    const std::vector<double> none(configs.size(), std::numeric_limits<double>::quiet_NaN());
    replay_metrics.try_emplace(row.metric, none).first->second[row.config] = row.value;
  }
  return replay_metrics;
}

std::vector<TokenScores> end_to_end_scores(const SweepRunner& run_sweep, const EvalText& text,
                                           std::span<const CacheConfig> configs, unsigned threads,
                                           std::function<void(double)> progress) {
  std::vector<CacheConfig> full_and_configs{CacheConfig{}};
  full_and_configs.insert(full_and_configs.end(), configs.begin(), configs.end());
  return std::move(run_sweep({text.ids}, full_and_configs,
                             {.prompt_tokens = text.prompt_tokens,
                              .threads = threads,
                              .progress = std::move(progress)})[0]);
}

std::vector<std::vector<double>> kl_of(std::vector<TokenScores> scores) {
  std::vector<std::vector<double>> kl;
  for (std::size_t c = 1; c < scores.size(); ++c) kl.push_back(std::move(scores[c].kl));
  return kl;
}

double end_to_end_rate(const SweepRunner& run_sweep, const EvalText& text, unsigned threads) {
  constexpr std::size_t kTokens = 192;
  EvalText beginning{.name = text.name, .ids = text.ids, .prompt_tokens = 1};
  beginning.ids.resize(std::min(kTokens, beginning.ids.size()));
  const WorkTime took =
      measure_time([&] { end_to_end_scores(run_sweep, beginning, {}, threads, {}); });
  return took.seconds / static_cast<double>(beginning.ids.size());
}

namespace {

using nlohmann::ordered_json;

// Maximum number of pairs that are listed for each metric and budget.
constexpr std::size_t kMaxMisordered = 10;
constexpr std::size_t kMaxTableBytes = std::size_t{64} << 20;

ordered_json wrong_json(const FidelityBudget& budget, std::span<const CacheConfig> configs) {
  ordered_json list = ordered_json::array();
  for (const Misordered& wrong : budget.misordered) {
    if (list.size() == kMaxMisordered) break;
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
                         {"significantly_different", {}},
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
    object["significantly_different"][budget.budget] = budget.significantly_different;
    object["misordered"][budget.budget] = budget.misordered.size();
    object["wrong"][budget.budget] = wrong_json(budget, configs);
  }
  return object;
}

/// The tokens of a budget (the mean if heads differ) in texts with these lengths; nullopt for a
/// budget in bytes or in a file. Throws std::runtime_error for a share of texts that differ in
/// length.
std::optional<double> tokens_of(const std::string& budget, const JsonFields& tokens) {
  if (budget.starts_with('@')) return std::nullopt;
  Budget requested;
  try {
    requested = parse_budget(budget);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(fmt::format("{}: {}", tokens.where(), error.what()));
  }
  if (requested.bytes > 0) return std::nullopt;
  if (!requested.extent.is_share) return requested.extent.tokens;
  std::set<std::uint64_t> lengths;
  for (const auto& [text, length] : tokens.json().items()) lengths.insert(tokens.whole(text));
  if (lengths.size() != 1)
    throw std::runtime_error(
        fmt::format("{}: {} texts have {} different lengths, so budget {} is not one number of "
                    "tokens; use texts of one length, or budgets in tokens",
                    tokens.where(), tokens.json().size(), lengths.size(), budget));
  return static_cast<double>(*lengths.begin()) * requested.extent.share_ppm / 1e6;
}

/// Reads a rank correlation, if it is there.
std::optional<double> optional_rho(const JsonFields& fields, const std::string& key) {
  return fields.has(key) ? std::optional(fields.number(key, -1, 1)) : std::nullopt;
}
std::optional<double> optional_regret(const JsonFields& fields, const std::string& key) {
  constexpr double kMax = 1e9;
  return fields.has(key) ? std::optional(fields.number(key, 0, kMax)) : std::nullopt;
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
      csv += fmt::format(
          "{},{},{},{}\n", csv_field(text.name),
          config_columns(configs[c], configs[c].budget_in_tokens(text.tokens, head_size)), metric,
          value);
  };
  for (const FidelityText& text : texts)
    for (std::size_t c = 0; c < configs.size(); ++c) {
      add(text, c, "kl", text.kl[c]);
      for (const auto& [metric, values] : text.replay_metrics) add(text, c, metric, values[c]);
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
  const std::string text = read_text_file(file, kMaxTableBytes);
  const nlohmann::json top = parse_json(text, file.string());
  const JsonFields fields(top, file.string());
  fields.check_format(kFidelityFormat);
  if (fields.text("weights_xxh3") != weights_xxh3)
    throw std::runtime_error(fmt::format(
        "{}: was measured on weights {} of {}, but the run's model has weights {}; run kvlab "
        "fidelity on that model",
        file.string(), fields.text("weights_xxh3"), fields.text("model"), weights_xxh3));
  const JsonFields metrics = fields.object("metrics");
  if (!metrics.has(metric))
    throw std::runtime_error(
        fmt::format("{}: has no results for {}, the metric to choose by; give --metric with a "
                    "metric that the file has",
                    file.string(), metric));
  const JsonFields own = metrics.object(metric), within = own.object("within");
  const JsonFields tokens = fields.object("tokens");
  std::string nearest;
  double min_apart = std::numeric_limits<double>::infinity();
  for (const auto& [budget, value] : within.json().items()) {
    const auto count = tokens_of(budget, tokens);
    const double apart =
        count ? std::abs(std::log(*count / static_cast<double>(budget_tokens))) : min_apart;
    if (apart < min_apart) min_apart = apart, nearest = budget;
  }
  if (nearest.empty())
    throw std::runtime_error(own.where() + ": key 'within' has no budget in tokens or percent");
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
      "{} predicts the order of end-to-end KL with rank correlation {} ({} to {}) at a budget of "
      "{}, regret {}; measured on {} texts",
      evidence["metric"].get<std::string>(), number("rho"), number("rho_low"), number("rho_high"),
      evidence["budget"].get<std::string>(), number("regret"),
      evidence["texts"].get<std::size_t>());
}

}  // namespace kvlab
