#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <stdexcept>

#include "engine/evaluation/deploy/deploy.hpp"
#include "engine/evaluation/eval.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "sim/report/recommendation.hpp"
#include "sim/report/text.hpp"
#include "tools/command.hpp"
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

struct Request {
  std::string run, budget, metric, fidelity, out;
  std::size_t confirm = 0;  ///< number of policies to confirm
  std::string model;        ///< for --confirm, as are `texts` and `how`
  std::vector<std::string> texts;
  EvalOptions how;
  TaskAccuracyOptions task_accuracy;
  CacheOptions caches;
  CommonOptions common;
};

void check(Request& request, const GivenOptions& given) {
  given.refuse_without(
      "confirm", {"model", "text", "max-tokens", "device", "task", "words", "samples", "features"});
  given.require("run", "kvlab deploy RUN, a directory of `kvlab replay`");
  given.require("budget", "--budget B, one of the run's budgets");
  given.require("out", "--out policy.json");
  refuse_unwritable(request.out, "--out");
  request.how.threads = request.common.threads;
  if (request.confirm == 0) return;
  require_model(given, request.model, "--model DIR, the model that --confirm runs");
  given.require("text", "--text FILE..., the texts that --confirm scores");
  request.how.names = text_names(request.texts);
  if (!given.has("device") && has_cuda_device()) request.common.device = Device::cuda;
  request.task_accuracy.plan.max_rows = task_accuracy_rows(request.common.device);
}

void add_options(OptionTable& table, Request& request) {
  table.text("run", "RUN", request.run, "directory of a run of `kvlab replay`");
  table.text("budget", "B", request.budget, "a budget of the run");
  table.text(
      "metric", "METRIC", request.metric,
      "metric to choose by, such as recall (default: the first of kl_estimate_joint, kl_estimate, "
      "residual_error, layer_error and nll_recall that every trace of the run has)");
  table.text("fidelity", "FILE", request.fidelity,
             "fidelity.json of `kvlab fidelity`, which says how well the metric predicts this "
             "model");
  table.text("out", "FILE", request.out, "the policy file; an existing file is replaced");
  table.whole("confirm", "K", {0, 1 << 20}, request.confirm,
              "evaluate the best K end to end and choose among them by KL, paired over the same "
              "tokens (requires --model and --text)");
  table.text("model", "DIR", request.model, "--confirm: directory of the model");
  table.texts("text", "FILE...", Takes::several_words, request.texts, "--confirm: texts to score");
  table.whole("max-tokens", "T", {0, 1 << 30}, request.how.max_tokens,
              "--confirm: use the first T tokens of each text (0: all)");
  add_task_accuracy_options(table, request.task_accuracy, request.caches.features);
  add_source_option(table, request.caches.sources);
  add_features_option(table, request.caches.features);
  add_common_options(table, request.common, Device::cpu);  // only --confirm needs a device
}

/// The model for --confirm; nullopt if --confirm was not given.
std::optional<EvalModel> load_confirming_model(const Request& request, const Run& run) {
  if (request.confirm == 0) return std::nullopt;
  EvalModel model = load_eval_model(request.model, request.common);
  if (model.backend->weights_xxh3() != run.info.traces.front().weights_xxh3)
    throw std::invalid_argument(
        fmt::format("--model: {} has other weights than the run's model {}; give the model whose "
                    "traces the run replayed",
                    model.directory, run.info.traces.front().model));
  return model;
}

/// Evaluates the full cache and the K best configurations of the ballot (--confirm K) end to end.
Evaluation evaluate_first(const Request& request, const EvalModel& model, const Run& run,
                          const MetricTable& metric_table, const Ballot& ballot,
                          const CompiledPolicies& compiled) {
  EvalOptions how = request.how;
  how.progress = progress_bar("deploy: end-to-end evaluation");
  std::vector<CacheConfig> configs{CacheConfig{}};  // the full cache
  for (std::size_t i = 0; i < std::min(request.confirm, ballot.ranked().size()); ++i)
    configs.push_back(config_of(run, ballot, metric_table, i, compiled));
  how.before = model.tokenizer.before();
  const std::size_t max_tokens = how.max_tokens ? how.max_tokens + how.before.size() : kAllTokens;
  std::vector<std::vector<std::int32_t>> texts;
  texts.reserve(request.texts.size());
  for (const std::string& path : request.texts)
    texts.push_back(ids_of_file(path, model.tokenizer, max_tokens));
  say_of_model(model.backend->config(), model.tokenizer);
  Evaluation evaluation =
      evaluate(model.backend->config(), model.run_sweep, texts, std::move(configs), how);
  for (const std::string& warning : eval_warnings(evaluation))
    fmt::print(stderr, "kvlab deploy: {}\n", warning);
  return evaluation;
}

/// Measures the task accuracy of the confirmed configurations. The best of them by both criteria
/// (KL and task accuracy) becomes the ballot's winner.
nlohmann::json decide_by_both_criteria(TaskAccuracyPlan plan, const EvalModel& model,
                                       const std::vector<Confirmed>& confirmed, Ballot& ballot) {
  if (!plan.tasks.empty()) plan.chat = read_chat_frame(model.directory);
  find_lengths(*model.backend, model.tokenizer, plan);
  std::vector<Confirmed> order = confirmed;  // lowest KL first
  std::ranges::stable_partition(
      order, [&](const Confirmed& entry) { return entry.rank == ballot.winner; });
  std::vector<Finalist> finalists;
  std::erase_if(order, [&](const Confirmed& entry) {
    return entry.over_budget && entry.rank != ballot.winner;
  });
  for (const Confirmed& entry : order) finalists.push_back({entry.score.config, entry.score.kl});
  std::vector<TaskAccuracy> evaluated;
  if (!plan.tasks.empty())
    evaluated = evaluate_finalists(*model.backend, model.tokenizer, finalists, plan,
                                   progress_bar("deploy: task accuracy"));
  const Choice choice = choose_by_both_criteria(finalists, evaluated);
  ballot.winner = order[choice.deployed].rank;
  return criteria_json(finalists, evaluated, choice);
}

void print_recommended(const Recommendation& made) {
  fmt::print("{}", recommendations_text({&made, 1}));
  for (const std::string& warning : recommendation_warnings(made))
    fmt::print(stderr, "kvlab deploy: {}\n", warning);
}

/// Prints every candidate, lowest mean first: metric, mean and peak memory, and the difference from
/// the choice.
void print_candidates(const Recommendation& made) {
  fmt::print("\n  {:<28} {:>8} {:>9} {:>9}  {}\n", "policy", "mean", "memory", "peak",
             "difference from the choice");
  const auto line = [&](std::size_t c, const std::string& note) {
    const Candidate& own = made.candidates[c];
    fmt::print("{} {:<28} {:>8} {:>9} {:>9}  {}\n", c == made.choice ? '>' : ' ', own.name,
               number_text(made.mean(c)), bytes_text(own.memory.mean), bytes_text(own.memory.peak),
               note);
  };
  for (const std::size_t c : made.order)
    line(c, c == made.choice ? "chosen" : difference_text(made.difference(c)));
  for (const std::size_t c : made.over_budget) line(c, "over budget");
}

int run(const Request& request) {
  const std::string& out = request.out;
  const OutputClaim claim(out);
  const Run loaded = load_run(request.run);
  if (!loaded.info.refetch.empty())
    throw std::invalid_argument(fmt::format(
        "{}: was replayed with --refetch {}, and deployed caches evict for good; replay "
        "without --refetch",
        request.run, loaded.info.refetch));
  const MetricTable metric_table(loaded.rows);
  const std::string metric =
      request.metric.empty() ? std::string(best_metric(loaded.rows)) : request.metric;
  Ballot ballot = rank_for_deployment(loaded, metric_table, request.budget, metric);
  if (const std::string why = best_metric_text(loaded.rows); !why.empty() && request.metric.empty())
    fmt::print(stderr, "kvlab deploy: {}\n", why);
  const auto compiled = compiled_policies(request.caches, request.common);
  nlohmann::json evidence = "unknown";
  if (!request.fidelity.empty())
    evidence = fidelity_evidence(request.fidelity, std::string(ballot.metric->name),
                                 ballot.budget.min_tokens, loaded.info.traces.front().weights_xxh3);
  const std::optional<EvalModel> model = load_confirming_model(request, loaded);
  std::vector<Confirmed> confirmed;
  nlohmann::json criteria{
      {"answers", nullptr},
      {"why", "Task accuracy was not evaluated; add --confirm K to evaluate the best K"}};
  Evaluation evaluation;
  if (model) {
    evaluation = evaluate_first(request, *model, loaded, metric_table, ballot, compiled);
    confirmed = confirm(evaluation, ballot);
    criteria = decide_by_both_criteria(request.task_accuracy.plan, *model, confirmed, ballot);
  }
  PolicyFile file = policy_file_of(loaded, metric_table, ballot, compiled);
  file.run["fidelity"] = evidence;
  if (!confirmed.empty()) file.run["confirmed"] = confirmed_json(confirmed, metric_table, ballot);
  file.run["criteria"] = criteria;
  write_policy_file(out, file);

  if (request.common.json) {
    print_json({{"policy_file", out},
                {"policy", file.cache.policy.name},
                {"params", file.cache.policy.params_text()},
                {"budget_tokens", file.cache.budget.extent.tokens},
                {"positions", name_of(file.cache.positions)},
                {"evidence", file.run}});
    return 0;
  }
  print_recommended(ballot.ranking.recommendation);
  print_candidates(ballot.ranking.recommendation);
  if (!confirmed.empty()) {
    fmt::print("\nEnd-to-end evaluation: KL to the full cache, over the same tokens\n");
    const auto judgement = evaluation.judge_budget(evaluation.scores[1].config.budget.text());
    print_recommended(judgement.recommendation);
    print_candidates(judgement.recommendation);
  }
  fmt::print("\n{}",
             model ? criteria_text(criteria) : criteria.at("why").get<std::string>() + "\n");
  fmt::print("\n{}\n", evidence.is_object()
                           ? evidence_text(evidence)
                           : fmt::format("How well {} predicts this model's end-to-end KL is not "
                                         "known; kvlab fidelity measures it.",
                                         ballot.metric->name));
  std::string sources;  // generate needs them to read the policy file
  for (const std::string& source : request.caches.sources) sources += " --policy-source " + source;
  fmt::print(
      "\n{}: {} at {} tokens\nNext: kvlab generate --model DIR --prompt TEXT --policy-file {}{}\n",
      out, file.cache.policy.text(), file.cache.budget.extent.tokens, out, sources);
  return 0;
}

}  // namespace

Command deploy_command() {
  return {
      .name = "deploy",
      .summary = "writes the best policy of a run at a budget as a policy file",
      .usage =
          "RUN --budget B [--metric METRIC] [--confirm K --model DIR --text FILE...] --out FILE",
      .example = "kvlab deploy run --budget 128 --out policy.json",
      .positional = "run",
      .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
