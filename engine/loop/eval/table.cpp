#include "engine/loop/eval/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "sim/report/verdict.hpp"
#include "sim/run/csv.hpp"
#include "traces/base/json.hpp"
#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

ordered_json config_json(const EvalScore& score) {
  const CacheConfig& cache = score.config;
  return {{"policy", cache.policy.name},
          {"params", cache.policy.params_text()},
          {"budget", cache.budget_text()},
          {"budget_tokens", score.budget_tokens},
          {"prefill", cache.prefill.text()},
          {"positions", name_of(cache.positions)},
          {"seed", cache.seed}};
}

ordered_json score_json(const EvalScore& score, const std::vector<std::string>& texts) {
  ordered_json object = config_json(score);
  object["perplexity"] = number_or_null(score.perplexity);
  object["perplexity_stderr"] = number_or_null(score.perplexity_error);
  object["nll"] = number_or_null(score.nll);
  object["nll_stderr"] = number_or_null(score.nll_error);
  object["kl"] = number_or_null(score.kl);
  object["kl_stderr"] = number_or_null(score.kl_error);
  object["kl_p50"] = number_or_null(score.kl_p50);
  object["kl_p90"] = number_or_null(score.kl_p90);
  object["kl_p99"] = number_or_null(score.kl_p99);
  object["top1_agreement"] = number_or_null(score.same_first);
  object["tokens"] = score.tokens;
  object["kv_bytes_mean"] = score.memory.mean;
  object["kv_bytes_peak"] = score.memory.peak;
  object["kv_bytes_measured"] = score.kv_bytes_most;
  object["state_bytes"] = score.memory.state;
  object["budget_bytes"] = score.memory.budget;
  if (score.memory.exempt_peak > 0) object["exempt_bytes_peak"] = score.memory.exempt_peak;
  if (score.memory.span_peak > 0) {
    object["span_bytes_mean"] = score.memory.span_mean;
    object["span_bytes_peak"] = score.memory.span_peak;
  }
  if (score.texts.size() > 1) {
    object["nll_deviation"] = number_or_null(score.nll_deviation);
    object["kl_deviation"] = number_or_null(score.kl_deviation);
    object["by_text"] = ordered_json::array();
    for (std::size_t t = 0; t < score.texts.size(); ++t)
      object["by_text"].push_back({{"text", texts[t]},
                                   {"nll", number_or_null(score.texts[t].nll)},
                                   {"kl", number_or_null(score.texts[t].kl)},
                                   {"tokens", score.texts[t].tokens}});
  }
  if (score.blocks.empty()) return object;
  object["blocks"] = ordered_json::array();
  for (const EvalBlock& block : score.blocks)
    object["blocks"].push_back({{"first", block.first},
                                {"perplexity", number_or_null(std::exp(block.nll))},
                                {"ms_per_token", number_or_null(block.milliseconds_per_token)}});
  return object;
}

ordered_json pair_json(const Evaluation& evaluation, std::size_t a, std::size_t b) {
  const CacheConfig &one = evaluation.scores[a].config, &other = evaluation.scores[b].config;
  ordered_json object{{"a", a},
                      {"b", b},
                      {"a_policy", one.policy.text()},
                      {"a_budget", one.budget_text()},
                      {"b_policy", other.policy.text()},
                      {"b_budget", other.budget_text()}};
  if (evaluation.against_full) object["kl"] = difference_json(evaluation.kl.difference(a, b));
  object["nll"] = difference_json(evaluation.nll.difference(a, b));
  return object;
}

/// Every configuration with the first one, and every two of one budget in tokens.
ordered_json pairs_json(const Evaluation& evaluation) {
  const auto& scores = evaluation.scores;
  ordered_json pairs = ordered_json::array();
  for (std::size_t b = 0; b < scores.size(); ++b)
    for (std::size_t a = b + 1; a < scores.size(); ++a)
      if (b == 0 || (scores[a].config.evicts() && scores[b].config.evicts() &&
                     scores[a].budget_tokens == scores[b].budget_tokens))
        pairs.push_back(pair_json(evaluation, a, b));
  return pairs;
}

/// By budget: who contends, the best first, and behind them who holds more than the budget.
ordered_json contenders_json(const Evaluation& evaluation) {
  ordered_json object = ordered_json::object();
  for (const std::string& budget : evaluation.budgets()) {
    const auto [scores, contenders, verdict, scope] = evaluation.judged(budget);
    const auto add = [&](std::size_t c, const Difference& behind, bool holds_more) {
      object[budget].push_back({{"configuration", scores[c]},
                                {"policy", contenders[c].name},
                                {"behind", difference_json(behind)},
                                {"holds_more", holds_more},
                                {"kv_bytes_mean", contenders[c].memory.mean},
                                {"kv_bytes_peak", contenders[c].memory.peak}});
    };
    for (std::size_t i = 0; i < verdict.order.size(); ++i)
      add(verdict.order[i], verdict.behind[i], false);
    for (const std::size_t c : verdict.more) add(c, {}, true);
  }
  return object;
}

ordered_json verdicts_json(const Evaluation& evaluation) {
  ordered_json object = ordered_json::object();
  for (const std::string& budget : evaluation.budgets()) {
    const auto judged = evaluation.judged(budget);
    object[budget] = verdict_json(judged.verdict, judged.contenders, judged.scope);
  }
  return object;
}

/// Error against bytes, over all budgets: those that none dominates.
ordered_json frontier_json(const Evaluation& evaluation) {
  const auto judged = evaluation.all_judged();
  if (judged.contenders.empty()) return ordered_json::array();
  return verdict_json(judged.verdict, judged.contenders, judged.scope)["frontier"];
}

}  // namespace

std::string config_columns(const CacheConfig& config, std::uint32_t budget_tokens) {
  return fmt::format("{},{},{},{},{},{},{}", csv_field(config.policy.name),
                     csv_field(config.policy.params_text()), csv_field(config.budget_text()),
                     budget_tokens, config.prefill.text(), name_of(config.positions), config.seed);
}

std::string eval_csv(const Evaluation& evaluation, const std::vector<std::string>& texts) {
  std::string csv = fmt::format("text,{},metric,value,stderr,count\n", kConfigColumns);
  for (const EvalScore& score : evaluation.scores) {
    const std::string columns = config_columns(score.config, score.budget_tokens);
    const auto add = [&](std::string_view text, std::string_view metric, double value, double error,
                         std::uint64_t count) {
      if (std::isfinite(value))
        csv += fmt::format("{},{},{},{},{},{}\n", csv_field(text), columns, metric, value,
                           std::isfinite(error) ? fmt::format("{}", error) : "", count);
    };
    add("all", "perplexity", score.perplexity, score.perplexity_error, score.tokens);
    add("all", "nll", score.nll, score.nll_error, score.tokens);
    add("all", "kl", score.kl, score.kl_error, score.tokens);
    add("all", "kl_p50", score.kl_p50, kNaN, score.tokens);
    add("all", "kl_p90", score.kl_p90, kNaN, score.tokens);
    add("all", "kl_p99", score.kl_p99, kNaN, score.tokens);
    add("all", "top1_agreement", score.same_first, kNaN, score.tokens);
    add("all", "kv_bytes_mean", score.memory.mean, kNaN, 1);
    add("all", "kv_bytes_peak", score.memory.peak, kNaN, 1);
    add("all", "state_bytes", score.memory.state, kNaN, 1);
    add("all", "budget_bytes", score.memory.budget, kNaN, 1);
    for (std::size_t t = 0; t < score.texts.size(); ++t) {
      add(texts[t], "nll", score.texts[t].nll, kNaN, score.texts[t].tokens);
      add(texts[t], "kl", score.texts[t].kl, kNaN, score.texts[t].tokens);
    }
  }
  return csv;
}

std::vector<std::string> eval_warnings(const Evaluation& evaluation) {
  std::vector<std::string> lines;
  for (const std::string& budget : evaluation.budgets()) {
    const auto [scores, contenders, verdict, scope] = evaluation.judged(budget);
    for (std::string& line : verdict_warnings(verdict, contenders, scope))
      if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
  }
  return lines;
}

ordered_json eval_json(const Evaluation& evaluation, const std::vector<std::string>& texts) {
  ordered_json object{{"format", kEvalFormat},
                      {"texts", texts},
                      {"tokens", evaluation.scores.front().tokens},
                      {"configurations", ordered_json::array()},
                      {"pairs", pairs_json(evaluation)},
                      {"contenders", contenders_json(evaluation)},
                      {"verdicts", verdicts_json(evaluation)},
                      {"frontier", frontier_json(evaluation)},
                      {"warnings", eval_warnings(evaluation)}};
  for (const EvalScore& score : evaluation.scores)
    object["configurations"].push_back(score_json(score, texts));
  return object;
}

ResultRow score_row(const CsvRecord& record, std::string_view name) {
  const bool tokens = record.has("budget_tokens");
  return {.trace = record.text(name),
          .policy = record.text("policy"),
          .params = record.text("params"),
          .budget = record.text("budget"),
          .budget_tokens = tokens ? record.number<std::uint32_t>("budget_tokens") : 0,
          .prefill = record.text("prefill"),
          .positions = record.text("positions"),
          .seed = record.number<std::uint64_t>("seed"),
          .metric = record.text("metric"),
          .value = record.number<double>("value"),
          .standard_error = record.has("stderr") ? record.number<double>("stderr") : kNaN,
          .count = record.has("count") ? record.number<std::uint64_t>("count") : 0};
}

std::vector<ResultRow> parse_score_rows(std::string_view text, std::string_view file) {
  std::vector<ResultRow> rows;
  read_records(text, file,
               [&](const CsvRecord& record) { rows.push_back(score_row(record, "text")); });
  if (rows.empty()) throw std::runtime_error(fmt::format("{}: holds no rows", file));
  return rows;
}

}  // namespace kvlab
