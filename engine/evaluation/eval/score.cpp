#include "engine/evaluation/eval/score.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <stdexcept>

#include "policies/catalogue.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "sim/run/results.hpp"
#include "traces/base/json.hpp"
#include "traces/base/numeric/nan.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kAnyBudget = "any budget";

/// One configuration's scores by blocks of `tokens` tokens. A block contains the tokens at the same
/// indices of all sequences, except sequences that a longer text contains.
std::vector<EvalBlock> blocks_of(std::size_t c, const ScoredSequences& sequences,
                                 std::size_t tokens) {
  std::vector<EvalBlock> blocks;
  if (tokens == 0) return blocks;
  std::vector<const TokenScores*> scores;
  for (std::size_t s = 0; s < sequences.scores.size(); ++s)
    if (sequences.counts(s)) scores.push_back(&sequences.scores[s][c]);
  std::size_t longest = 0;
  for (const TokenScores* sequence : scores) longest = std::max(longest, sequence->nll.size());
  for (std::size_t first = 0; first < longest; first += tokens) {
    double nll = 0, seconds = 0;
    std::size_t count = 0, timed = 0;
    for (const TokenScores* sequence : scores) {
      const TokenScores& one = *sequence;
      for (std::size_t i = first; i < std::min(first + tokens, one.nll.size()); ++i, ++count) {
        nll += one.nll[i];
        if (i < one.seconds.size()) seconds += static_cast<double>(one.seconds[i]), ++timed;
      }
    }
    blocks.push_back(
        {.first = first,
         .nll = nll / static_cast<double>(count),
         .milliseconds_per_token = timed ? 1e3 * seconds / static_cast<double>(timed) : kNaN});
  }
  return blocks;
}

/// Throws if a score is not finite.
void refuse_not_finite(const ScoredSequences& sequences, std::size_t c) {
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    const std::vector<double>& nll = sequences.scores[s][c].nll;
    const auto wrong =
        std::ranges::find_if(nll, [](double value) { return !std::isfinite(value); });
    if (wrong != nll.end())
      throw std::runtime_error(fmt::format(
          "text {}: the log-likelihood of scored token {} is not finite; the model's weights may "
          "be damaged, or too large for its dtype",
          sequences.text[s] + 1, wrong - nll.begin()));
  }
}

/// Sets the number of scored tokens (a sum) and the memory (means and maxima), over the sequences
/// that count.
void add_means(EvalScore& score, std::size_t c, const ScoredSequences& sequences) {
  double counted = 0;
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    const TokenScores& one = sequences.scores[s][c];
    if (!sequences.counts(s)) continue;
    ++counted;
    score.tokens += one.nll.size();
    score.kv_bytes_peak = std::max(score.kv_bytes_peak, one.kv_bytes_peak);
    if (sequences.memory.empty()) continue;
    const Memory& memory = sequences.memory[c][s];
    score.memory.mean += memory.mean;
    score.memory.peak = std::max(score.memory.peak, memory.peak);
    score.memory.state = std::max(score.memory.state, memory.state);
    score.memory.exempt_peak = std::max(score.memory.exempt_peak, memory.exempt_peak);
    score.memory.window_mean += memory.window_mean;
    score.memory.window_peak = std::max(score.memory.window_peak, memory.window_peak);
    score.memory.budget = std::max(score.memory.budget, memory.budget);
  }
  score.memory.mean /= counted;
  score.memory.window_mean /= counted;
}

void add_percentiles(EvalScore& score, std::size_t c, const ScoredSequences& sequences) {
  std::vector<double> kl;
  for (std::size_t s = 0; s < sequences.scores.size(); ++s) {
    const std::vector<double>& own = sequences.scores[s][c].kl;
    if (sequences.counts(s)) kl.insert(kl.end(), own.begin(), own.end());
  }
  score.kl_p50 = quantile(kl, 0.5);
  score.kl_p90 = quantile(kl, 0.9);
  score.kl_p99 = quantile(std::move(kl), 0.99);
}

void add_texts(EvalScore& score, std::size_t c, const ScoredSequences& sequences) {
  for (std::size_t s = 0; s < sequences.text.size(); ++s) {
    if (sequences.text[s] >= score.texts.size()) score.texts.resize(sequences.text[s] + 1, {});
    if (!sequences.counts(s)) continue;
    EvalTextScore& text = score.texts[sequences.text[s]];
    const TokenScores& one = sequences.scores[s][c];
    for (const double nll : one.nll) text.nll += nll;
    for (const double kl : one.kl) text.kl += kl;
    for (const double acceptance : one.acceptance) text.acceptance += acceptance;
    text.tokens += one.nll.size();
  }
  std::vector<double> nll, kl;
  for (EvalTextScore& text : score.texts) {
    const bool counts = text.tokens > 0;
    text.nll = counts ? text.nll / static_cast<double>(text.tokens) : kNaN;
    text.kl = counts ? text.kl / static_cast<double>(text.tokens) : kNaN;
    text.acceptance =
        counts && score.draft ? text.acceptance / static_cast<double>(text.tokens) : kNaN;
    if (counts) nll.push_back(text.nll), kl.push_back(text.kl);
  }
  score.nll_deviation = spread_of(nll).deviation;
  score.kl_deviation = spread_of(kl).deviation;
}

/// Sets the scores against the full cache to NaN if the full cache was not run.
void forget_full(EvalScore& score) {
  score.kl = score.kl_error = score.kl_p50 = score.kl_p90 = score.kl_p99 = score.same_first =
      score.same_first_error = kNaN;
  score.kl_deviation = kNaN;
  for (EvalTextScore& text : score.texts) text.kl = kNaN;
}

void add_errors(EvalScore& score, std::size_t c, const Evaluation& evaluation) {
  const Difference nll = evaluation.nll.average(c), kl = evaluation.kl.average(c);
  score.nll = nll.mean, score.nll_error = nll.standard_error;
  score.perplexity = std::exp(nll.mean);
  score.perplexity_error = score.perplexity * nll.standard_error;
  score.kl = kl.mean, score.kl_error = kl.standard_error;
  const Difference same = evaluation.same_first.average(c);
  score.same_first = same.mean, score.same_first_error = same.standard_error;
}

/// The acceptance of the tokens at one depth (from 0) of windows of `window` tokens.
std::vector<double> acceptance_at(const TokenScores& scores, std::size_t depth,
                                  std::size_t window) {
  std::vector<double> values;
  for (std::size_t i = depth; i < scores.acceptance.size(); i += window)
    values.push_back(scores.acceptance[i]);
  return values;
}

/// For each whole window: 1 + a1 + a1 a2 + a1 a2 a3 + …, where a1, a2, … is the acceptance of its
/// tokens.
std::vector<double> tokens_per_verification(const TokenScores& scores, std::size_t window) {
  std::vector<double> values;
  for (std::size_t first = 0; first + window <= scores.acceptance.size(); first += window) {
    double all_accepted = 1, tokens = 1;
    for (std::size_t i = first; i < first + window; ++i)
      tokens += all_accepted *= scores.acceptance[i];
    values.push_back(tokens);
  }
  return values;
}

DraftScore draft_score(std::size_t c, const ScoredSequences& sequences,
                       const Evaluation& evaluation) {
  const std::size_t window = evaluation.draft;
  const auto mean_of = [&](const PairedScores& scores) {
    const Difference mean = scores.average(c);
    return MeanWithError{mean.mean, mean.standard_error};
  };
  DraftScore score{.acceptance = mean_of(evaluation.acceptance)};
  for (std::size_t depth = 0; depth < window; ++depth)
    score.by_depth.push_back(mean_of(paired_scores(
        sequences, [&](const TokenScores& one) { return acceptance_at(one, depth, window); })));
  score.tokens_per_verification = mean_of(paired_scores(
      sequences, [&](const TokenScores& one) { return tokens_per_verification(one, window); }));
  return score;
}

}  // namespace

std::vector<std::string> short_text_warnings(const ScoredSequences& sequences,
                                             std::span<const std::string> names) {
  std::vector<double> tokens(names.size());
  for (std::size_t s = 0; s < sequences.text.size(); ++s)
    if (sequences.counts(s))
      tokens[sequences.text[s]] += static_cast<double>(sequences.scores[s].front().nll.size());
  const std::size_t longest =
      static_cast<std::size_t>(std::ranges::max_element(tokens) - tokens.begin());
  std::vector<std::string> shorts;
  for (std::size_t t = 0; t < tokens.size(); ++t)
    if (tokens[t] > 0 && PairedScores::kShortText * tokens[t] < tokens[longest])
      shorts.push_back(fmt::format("{} ({:.0f})", names[t], tokens[t]));
  if (shorts.empty()) return {};
  return {fmt::format(
      "every text has weight 1, so short texts make means less certain; scored tokens: {}; longest "
      "text: {} ({:.0f})",
      join_names(shorts), names[longest], tokens[longest])};
}

EvalScore score_of(const CacheConfig& config, std::uint32_t budget_tokens, std::size_t c,
                   const ScoredSequences& sequences, const Evaluation& evaluation,
                   std::size_t block_tokens) {
  refuse_not_finite(sequences, c);
  EvalScore score{.config = config, .budget_tokens = budget_tokens};
  if (evaluation.draft) score.draft = draft_score(c, sequences, evaluation);
  add_means(score, c, sequences);
  add_errors(score, c, evaluation);
  add_percentiles(score, c, sequences);
  add_texts(score, c, sequences);
  if (!evaluation.compares_to_full) forget_full(score);
  score.blocks = blocks_of(c, sequences, block_tokens);
  return score;
}

std::string EvalScore::label(bool whole) const {
  const std::string policy = whole ? config.policy.text() : config.policy.brief();
  return config.evicts() && !config.budget.is_even()
             ? fmt::format("{} at {}", policy, config.budget.text())
             : policy;
}

std::vector<std::string> Evaluation::budgets() const {
  std::vector<std::string> budgets;
  std::map<std::uint32_t, std::string> by_tokens;
  for (const EvalScore& score : scores)
    // At budget `all`, policies do not differ.
    if (score.config.evicts() && !score.config.budget.all)
      by_tokens.try_emplace(score.budget_tokens, score.config.budget.text());
  for (const auto& [tokens, budget] : by_tokens) budgets.push_back(budget);
  return budgets;
}

Evaluation::Judgement Evaluation::judge(std::vector<std::size_t> which,
                                        const std::string& budget) const {
  Judgement judgement{.scores = std::move(which)};
  ComparisonScope scope{.budget = budget,
                        .metric = deciding_name(),
                        .higher_is_better = draft > 0,
                        .texts = deciding().texts(),
                        .tokens = scores.front().tokens,
                        .note = "Task accuracy was not measured."};
  const auto error = [&](std::size_t s) {
    return draft ? -deciding().mean(s) : deciding().mean(s);
  };
  if (!scores.front().config.evicts()) scope.full_bytes = scores.front().memory.mean;
  std::vector<Candidate> candidates;
  BudgetBytes budget_bytes;
  const bool is_any_budget = budget == kAnyBudget;
  for (const std::size_t s : judgement.scores) {
    const EvalScore& score = scores[s];
    const std::string name = is_any_budget ? fmt::format("{} at {}", score.config.policy.brief(),
                                                         score.config.budget_text())
                                           : score.label();
    candidates.push_back({.name = name, .error = error(s), .memory = score.memory});
    budget_bytes.add(score.memory.budget, score.config.policy.prompt);
    if (protected_tokens_fill(score.config.policy.name, score.config.policy.params_text(),
                              score.budget_tokens))
      scope.filled.push_back(score.label());
  }
  scope.budget_bytes = budget_bytes.bytes();
  std::vector<const CacheConfig*> configs;
  for (const std::size_t s : judgement.scores) configs.push_back(&scores[s].config);
  make_names_different(candidates, configs);
  if (!candidates.empty())
    judgement.recommendation =
        recommend(std::move(candidates), std::move(scope), [&](std::size_t a, std::size_t b) {
          const Difference own = deciding().difference(judgement.scores[a], judgement.scores[b]);
          return draft ? own.reverse() : own;
        });
  return judgement;
}

Evaluation::Judgement Evaluation::judge_budget(const std::string& budget) const {
  const auto named = std::ranges::find_if(scores, [&](const EvalScore& score) {
    return score.config.evicts() && score.config.budget.text() == budget;
  });
  std::vector<std::size_t> which;
  for (std::size_t s = 0; named != scores.end() && s < scores.size(); ++s)
    if (scores[s].config.evicts() && scores[s].budget_tokens == named->budget_tokens)
      which.push_back(s);
  return judge(std::move(which), budget);
}

Evaluation::Judgement Evaluation::judge_all() const {
  std::vector<std::size_t> which;
  for (std::size_t s = 0; s < scores.size(); ++s)
    if (scores[s].config.evicts()) which.push_back(s);
  return judge(std::move(which), std::string(kAnyBudget));
}

std::vector<Recommendation> Evaluation::recommendations() const {
  std::vector<Recommendation> made;
  for (const std::string& budget : budgets()) made.push_back(judge_budget(budget).recommendation);
  return made;
}

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

void add_draft(ordered_json& object, const DraftScore& draft) {
  const auto add = [&](const std::string& name, const MeanWithError& own) {
    object[name] = number_or_null(own.mean);
    object[name + "_stderr"] = number_or_null(own.error);
  };
  add("acceptance", draft.acceptance);
  auto &means = object["acceptance_by_depth"] = ordered_json::array(),
       &errors = object["acceptance_by_depth_stderr"] = ordered_json::array();
  for (const MeanWithError& own : draft.by_depth) {
    means.push_back(number_or_null(own.mean));
    errors.push_back(number_or_null(own.error));
  }
  add("tokens_per_verification", draft.tokens_per_verification);
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
  object["top1_agreement_stderr"] = number_or_null(score.same_first_error);
  if (score.draft) add_draft(object, *score.draft);
  object["tokens"] = score.tokens;
  object["kv_bytes_mean"] = score.memory.mean;
  object["kv_bytes_peak"] = score.memory.peak;
  object["kv_bytes_measured"] = score.kv_bytes_peak;
  object["state_bytes"] = score.memory.state;
  object["budget_bytes"] = score.memory.budget;
  if (score.memory.exempt_peak > 0) object["exempt_bytes_peak"] = score.memory.exempt_peak;
  if (score.memory.window_peak > 0) {
    object["window_bytes_mean"] = score.memory.window_mean;
    object["window_bytes_peak"] = score.memory.window_peak;
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
    for (std::size_t t = 0; score.draft && t < score.texts.size(); ++t)
      object["by_text"][t]["acceptance"] = number_or_null(score.texts[t].acceptance);
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
  if (evaluation.compares_to_full) object["kl"] = difference_json(evaluation.kl.difference(a, b));
  object["nll"] = difference_json(evaluation.nll.difference(a, b));
  if (evaluation.draft)
    object["acceptance"] = difference_json(evaluation.acceptance.difference(a, b));
  return object;
}

/// Compares every configuration in pairs with the first one, and every two configurations with the
/// same budget in tokens.
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

/// Error against bytes over all budgets: the configurations that no other dominates.
ordered_json frontier_json(const Evaluation& evaluation) {
  const auto judgement = evaluation.judge_all();
  if (judgement.scores.empty()) return ordered_json::array();
  return recommendation_json(judgement.recommendation)["frontier"];
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
    add("all", "top1_agreement", score.same_first, score.same_first_error, score.tokens);
    if (score.draft) {
      const auto add_mean = [&](const std::string& metric, const MeanWithError& own) {
        add("all", metric, own.mean, own.error, score.tokens);
      };
      add_mean("acceptance", score.draft->acceptance);
      for (std::size_t d = 0; d < score.draft->by_depth.size(); ++d)
        add_mean(fmt::format("acceptance_depth_{}", d + 1), score.draft->by_depth[d]);
      add_mean("tokens_per_verification", score.draft->tokens_per_verification);
    }
    add("all", "kv_bytes_mean", score.memory.mean, kNaN, 1);
    add("all", "kv_bytes_peak", score.memory.peak, kNaN, 1);
    add("all", "state_bytes", score.memory.state, kNaN, 1);
    add("all", "budget_bytes", score.memory.budget, kNaN, 1);
    for (std::size_t t = 0; t < score.texts.size(); ++t) {
      add(texts[t], "nll", score.texts[t].nll, kNaN, score.texts[t].tokens);
      add(texts[t], "kl", score.texts[t].kl, kNaN, score.texts[t].tokens);
      add(texts[t], "acceptance", score.texts[t].acceptance, kNaN, score.texts[t].tokens);
    }
  }
  return csv;
}

std::string eval_blocks_csv(const Evaluation& evaluation, const std::vector<std::string>& texts) {
  std::vector<ResultRow> rows;
  const auto add = [&](const PairedScores& scores, const char* metric) {
    for (const PairedText& text : scores.all())
      for (std::size_t c = 0; c < evaluation.scores.size(); ++c) {
        const CacheConfig& config = evaluation.scores[c].config;
        rows.push_back({.trace = texts[std::stoul(text.text)],
                        .policy = config.policy.name,
                        .params = config.policy.params_text(),
                        .budget = config.budget_text(),
                        .prefill = config.prefill.text(),
                        .positions = std::string(name_of(config.positions)),
                        .seed = config.seed,
                        .metric = metric,
                        .blocks = text.blocks[c],
                        .block_weights = text.block_weights});
      }
  };
  if (evaluation.compares_to_full) add(evaluation.kl, "kl");
  add(evaluation.nll, "nll");
  if (evaluation.draft) add(evaluation.acceptance, "acceptance");
  return blocks_csv(rows);
}

std::vector<std::string> eval_warnings(const Evaluation& evaluation) {
  std::vector<std::string> lines = evaluation.notes;
  // Adds this warning even if only the full cache was evaluated. Then there is a perplexity, but no
  // recommendation that would contain the warning.
  if (const std::string few = few_tokens_warning(evaluation.scores.front().tokens); !few.empty())
    lines.push_back(few);
  for (std::string& line : recommendation_warnings(evaluation.recommendations()))
    if (std::ranges::find(lines, line) == lines.end()) lines.push_back(std::move(line));
  return lines;
}

namespace {

/// The recommendations of each budget. The key `configurations` lists the candidates'
/// configurations in the order of `order` and then `over_budget`.
ordered_json eval_recommendations_json(const Evaluation& evaluation) {
  ordered_json list = ordered_json::array();
  for (const std::string& budget : evaluation.budgets()) {
    const auto [scores, made] = evaluation.judge_budget(budget);
    list.push_back(recommendation_json(made));
    auto& configurations = list.back()["configurations"] = ordered_json::array();
    for (const std::size_t c : made.order) configurations.push_back(scores[c]);
    for (const std::size_t c : made.over_budget) configurations.push_back(scores[c]);
  }
  return list;
}

}  // namespace

ordered_json eval_json(const Evaluation& evaluation, const std::vector<std::string>& texts) {
  ordered_json object{{"format", kEvalFormat},
                      {"texts", texts},
                      {"tokens", evaluation.scores.front().tokens},
                      {"configurations", ordered_json::array()},
                      {"pairs", pairs_json(evaluation)},
                      {"recommendations", eval_recommendations_json(evaluation)},
                      {"frontier", frontier_json(evaluation)},
                      {"warnings", eval_warnings(evaluation)}};
  if (evaluation.draft) object["draft"] = evaluation.draft;
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
