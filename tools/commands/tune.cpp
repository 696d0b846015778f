#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <set>
#include <string>

#include "engine/evaluation/tune/tune.hpp"
#include "policies/catalogue.hpp"
#include "sim/budgets/budget_file.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "sim/run/results.hpp"
#include "tools/command.hpp"
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kMaxShown = 8;  // maximum number of configurations shown for a round

struct Request {
  EvalModelOptions model;
  TuneRequest tune;
  TaskAccuracyOptions task_accuracy;
  unsigned work_percent = 25;
  CacheOptions caches;
  CommonOptions common;
  Budget budget;
  std::string out;
};

void check(Request& request, const GivenOptions& given) {
  given.require("out", "--out policy.json");
  refuse_unwritable(request.out, "--out");
  given.require("budget", "--budget B, tokens or a share");
  if (request.budget.all)
    throw std::invalid_argument(
        "--budget: all means the full cache, which evicts nothing; give tokens or a share");
  if (given.has("metric")) deciding_metric(request.tune.metric);
  require_model(given, request.model.model);
  request.tune.every_output_error = request.model.every_output_error;
  request.tune.threads = request.common.threads;
  request.tune.share = static_cast<double>(request.work_percent) / 100;
  request.tune.task_accuracy = request.task_accuracy.plan;
  request.tune.task_accuracy.seed = request.caches.sweep.seed;
  request.tune.task_accuracy.max_rows = task_accuracy_rows(request.common.device);
}

void add_options(OptionTable& table, Request& request) {
  add_eval_model_options(table, request.model);
  table.parsed("budget", "B", request.budget, read_budget,
               "cache size during decoding: tokens, or a share of the length: 256, 10%");
  table.list("policy", "P,...", request.caches.sweep.policies,
             "policies to try. A name without settings stands for several variants of the policy, "
             "which differ in protected tokens and parameters. A name with settings, such as "
             "h2o:recent=25%, stands only for itself (default: all policies except random and "
             "those that need features or once)");
  add_source_option(table, request.caches.sources);
  add_features_option(table, request.caches.features);
  add_tiers_option(table, request.caches);
  table.text("metric", "METRIC", request.tune.metric,
             "metric that orders the sweep before successive halving (default: the metric that "
             "`kvlab deploy` chooses by)");
  table.whole("work", "PERCENT", {1, 100}, request.work_percent,
              "work limit: share of the cost of evaluating the whole sweep end to end");
  add_task_accuracy_options(table, request.task_accuracy, request.caches.features);
  add_seed_option(table, request.caches.sweep.seed);
  table.text("out", "FILE", request.out, "the policy file; an older one is replaced");
  add_common_options(table, request.common);
}

/// All variants of the requested policies at the budget, with each tier plan, without duplicates.
std::vector<CacheConfig> variants(const Request& request, std::uint32_t tokens,
                                  const CompiledPolicies& compiled, const LeaveOut& leave_out) {
  std::vector<std::string> names = request.caches.sweep.policies;
  if (names.empty()) names = tunable_policies(compiled);
  std::vector<CacheConfig> sweep;
  const auto add_variants = [&](const std::string& name, const TierPlan& tier_plan) {
    for (PolicySpec& spec : policy_variants(name, tokens, compiled)) {
      if (!tier_plan.is_plain()) spec.tier_plan = tier_plan;
      if (tier_plan.is_quantized()) spec.centre = request.caches.centre;
      const Positions positions =
          spec.tier_plan.is_quantized() ? Positions::original : spec.entry->info.positions;
      const auto same = [&](const CacheConfig& other) {
        return other.policy.text() == spec.text();
      };
      if (std::ranges::none_of(sweep, same))
        sweep.push_back({.policy = std::move(spec),
                         .budget = request.budget,
                         .positions = positions,
                         .seed = request.caches.sweep.seed});
    }
  };
  std::exception_ptr first;
  std::set<std::string> lines;  // a policy is named once, even if there are several tier plans
  for (const TierPlan& tier_plan : request.caches.tier_plans)
    for (const std::string& name : names) try {
        add_variants(name, tier_plan);
      } catch (const BudgetTooSmall& error) {
        const std::string line = fmt::format("left out at budget {}: {}; {}", request.budget.text(),
                                             error.what(), error.remedy());
        if (lines.insert(line).second && leave_out) leave_out(line);
        if (!first) first = std::current_exception();
      }
  if (sweep.empty() && first) std::rethrow_exception(first);
  return sweep;
}

/// The difference from the leader, with its interval if there is one.
std::string from_lowest_text(const Difference& from_lowest) {
  const std::string mean = fmt::format("+{:.4f}", from_lowest.mean);
  if (std::isnan(from_lowest.interval.low)) return mean + ", no interval known";
  return fmt::format("{} ({:.4f} to {:.4f})", mean, from_lowest.interval.low,
                     from_lowest.interval.high);
}

void print_round(const Tuning& tuning, const TuneRequest& request, std::size_t index) {
  const HalvingRound& round = tuning.halving.rounds[index];
  std::vector<std::string> texts;
  for (const std::size_t text : round.texts) texts.push_back(request.texts[text].name);
  fmt::print("\nround {}: {} configurations evaluated end to end; texts added: {}\n", index + 1,
             round.entries.size(), fmt::join(texts, ", "));
  for (std::size_t i = 0; i < std::min(round.entries.size(), kMaxShown); ++i) {
    const HalvingEntry& entry = round.entries[i];
    const std::size_t config = tuning.order[entry.configuration];
    const std::string note(entry.status == HalvingStatus::stays ? "" : name_of(entry.status));
    fmt::print("  {:<28} KL {:.4f} {:>10}  {} {}\n", request.sweep[config].policy.brief(), entry.kl,
               bytes_text(tuning.memory[config].peak),
               i == 0 ? std::string("leads") : from_lowest_text(entry.from_lowest), note);
  }
  if (round.entries.size() > kMaxShown)
    fmt::print("  and {} more\n", round.entries.size() - kMaxShown);
}

/// Prints perplexity, KL with its deviation over the texts, and top-1 agreement of each
/// configuration and of the full cache.
void print_scores(const nlohmann::json& scores) {
  fmt::print("\n{:<28} {:>10} {:>18} {:>7} {:>8}\n", "", "perplexity", "KL ± SD over texts",
             "top-1", "tokens");
  for (const auto& score : scores) {
    const auto& deviation = score.at("kl_deviation");
    const std::string spread =
        deviation.is_null() ? "" : fmt::format("± {:.4f}", deviation.get<double>());
    fmt::print("{:<28} {:>10.3f} {:>9.4f} {:<8} {:>6.1f}% {:>8}\n",
               score.at("policy").get<std::string>(), score.at("perplexity").get<double>(),
               score.at("kl").get<double>(), spread, 100 * score.at("same_first").get<double>(),
               score.at("tokens").get<std::uint64_t>());
  }
}

void print_recommendation(const Tuning& tuning, const TuneRequest& request,
                          const std::string& out) {
  fmt::print("\n{}", recommendations_text({&tuning.recommendation, 1}));
  for (const std::string& warning : recommendation_warnings(tuning.recommendation))
    fmt::print(stderr, "kvlab tune: {}\n", warning);
  if (!tuning.over_budget.empty())
    fmt::print("{} configurations are over budget and were not evaluated; {} lists them\n",
               tuning.over_budget.size(), out);
  if (tuning.halving.end == HalvingEnd::alike) {
    std::size_t texts = 0;
    for (const HalvingRound& round : tuning.halving.rounds) texts += round.texts.size();
    fmt::print(
        "Stopped after {} of {} texts, because the other texts would not make the differences "
        "significant.\n",
        texts, request.texts.size());
  }
  fmt::print(
      "end-to-end evaluation: {} tokens over all configurations, {:.0f}% of the {} of the whole "
      "sweep\n",
      tuning.halving.work,
      100 * static_cast<double>(tuning.halving.work) /
          static_cast<double>(tuning.halving.exhaustive),
      tuning.halving.exhaustive);
}

/// The budget in tokens of 16 bit. Throws if the budget is less than one token under every tier
/// plan.
std::uint32_t budget_in_tokens(const Request& request, std::uint32_t length,
                               std::uint32_t head_size) {
  std::uint64_t min_token_bytes = kv_bytes_per_token(head_size);
  for (const TierPlan& tier_plan : request.caches.tier_plans)
    min_token_bytes = std::min(min_token_bytes, tier_plan.min_token_bytes(head_size));
  return request.budget.resolve(length, head_size, request.budget.is_even() ? min_token_bytes : 0);
}

/// The variants that can run on every text.
std::vector<CacheConfig> fitting_sweep(const Request& request, const std::vector<EvalText>& texts,
                                       const CacheShape& heads, std::uint32_t head_size,
                                       const CompiledPolicies& compiled) {
  const auto length = static_cast<std::uint32_t>(texts.front().ids.size());
  const LeaveOut leave_out = report_omissions("tune");
  return configs_that_fit(
      variants(request, budget_in_tokens(request, length, head_size), compiled, leave_out),
      [&](const CacheConfig& config) {
        for (const EvalText& text : texts)
          resolve(config.at_prompt(text.prompt_tokens), static_cast<std::uint32_t>(text.ids.size()),
                  0, heads);
      },
      leave_out);
}

int run(const Request& given) {
  const std::string& out = given.out;
  const OutputClaim claim(out);
  TuneRequest request = given.tune;
  request.progress = progress_bar("tune");
  const auto compiled = compiled_policies(given.caches, given.common);
  // Checks a budget in tokens before the model is loaded, because that check needs no model.
  if (!given.budget.extent.is_share && !given.budget.in_bytes)
    variants(given, given.budget.extent.tokens, compiled, nullptr);
  const EvalModel model = load_eval_model(given.model.model, given.common);
  request.texts = eval_texts(given.model, model, given.common.threads);
  const auto replayer = eval_replayer(given.common.device);
  request.device = replayer.get();
  const ModelConfig& config = model.backend->config();
  request.sweep = fitting_sweep(given, request.texts, config.heads(), config.head_size, compiled);
  if (!request.task_accuracy.tasks.empty())
    request.task_accuracy.chat = read_chat_frame(model.directory);
  find_lengths(*model.backend, model.tokenizer, request.task_accuracy);
  if (given.common.device == Device::cuda) request.by_tokens = token_sweep_runner(*model.backend);

  std::size_t longest = 0;
  for (const EvalText& text : request.texts)
    if (!text.trace) longest = std::max(longest, text.ids.size());
  announce_traces("tune", model.backend->trace_header({}).shape, longest,
                  "into TMPDIR, one text at a time");
  const OutputSketch sketch = output_sketch(model.directory, kSketchSeed, request.threads);
  const Tuning tuning = tune(*model.backend, model.run_sweep, sketch, model.tokenizer, request);
  const PolicyFile file = policy_file_of(tuning, request, *model.backend);
  write_policy_file(out, file);
  if (given.common.json) {
    print_json({{"policy_file", out},
                {"policy", file.cache.policy.name},
                {"params", file.cache.policy.params_text()},
                {"budget_tokens", file.cache.budget.extent.tokens},
                {"sweep", request.sweep.size()},
                {"evidence", file.run}});
    return 0;
  }
  fmt::print("{} configurations in the order of {}, over {} texts\n", request.sweep.size(),
             tuning.metric, request.texts.size());
  for (std::size_t r = 0; r < tuning.halving.rounds.size(); ++r) print_round(tuning, request, r);
  print_recommendation(tuning, request, out);
  print_scores(file.run.at("scores"));
  fmt::print("\n{}", criteria_text(file.run.at("criteria")));
  if (const auto& step = file.run.at("step"); step.is_object())
    fmt::print("a decoded token: {:.3f} ms; with the full cache: {:.3f} ms\n",
               step.at("milliseconds").at("deployed").get<double>(),
               step.at("milliseconds").at("full").get<double>());
  fmt::print(
      "{}: {} at {} tokens\nNext: kvlab generate --model DIR --prompt TEXT --policy-file {}\n", out,
      file.cache.policy.text(), tuning.budget_tokens, out);
  return 0;
}

}  // namespace

Command tune_command() {
  return {
      .name = "tune",
      .summary = "tunes a policy on texts: offline sweep, then successive halving",
      .usage = "--model DIR [--text FILE...] [--trace TRACE...] --budget B --out FILE [options]",
      .example =
          "kvlab tune --model engine/models/tiny --text tools/texts/carroll-alice.txt "
          "tools/texts/austen-emma.txt --prompt-tokens 128 --max-tokens 512 --budget 64 "
          "--out policy.json",
      .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
