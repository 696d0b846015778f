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
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "tools/turns.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("run", text_option("RUN"), "directory of a run of `kvlab replay`");
  add("budget", text_option("B"), "a budget of the run");
  add("metric", text_option("METRIC"),
      "metric to choose by: kl_estimate_joint, kl_estimate, residual_error, layer_error, "
      "nll_recall, recall, … (default: the first of the first five that every trace of the run "
      "has)");
  add("fidelity", text_option("FILE"),
      "fidelity.json of `kvlab fidelity`, which says how well the metric predicts this model");
  add("out", text_option("FILE"), "the policy file; an existing file is replaced");
  add("confirm", number_option("K", 0),
      "evaluate the best K end to end and choose among them by KL, paired over the same tokens "
      "(requires --model and --text)");
  add("model", text_option("DIR"), "--confirm: directory of the model");
  add("text", po::value<std::vector<std::string>>()->value_name("FILE...")->multitoken(),
      "--confirm: texts to score");
  add("max-tokens", number_option("T", 0),
      "--confirm: use the first T tokens of each text (0: all)");
  add_task_accuracy_options(options);
  add_source_option(options);
  add_features_option(options);
  add_common_options(options);
}

/// The number of --confirm, and the model that confirms; none if the number is 0.
std::size_t confirms(const po::variables_map& options) {
  return static_cast<std::size_t>(number_from(options, "confirm", 0, 1 << 20));
}
std::optional<EvalModel> model_from(const po::variables_map& options, const Run& run) {
  if (confirms(options) == 0) return std::nullopt;
  required(options, "model", "--model DIR, the model that --confirm runs");
  if (!options.count("text"))
    throw std::invalid_argument(
        "--text: missing; give --text FILE..., the texts that --confirm scores");
  EvalModel model = load_eval_model(options);
  if (model.backend->weights_xxh3() != run.info.traces.front().weights_xxh3)
    throw std::invalid_argument(fmt::format("--model: {} has other weights than the run's model {}",
                                            model.directory, run.info.traces.front().model));
  return model;
}

/// Evaluates the full cache and the first standings end to end.
Evaluation evaluate_first(const po::variables_map& options, const EvalModel& model, const Run& run,
                          const MetricTable& metric_table, const Ballot& ballot,
                          const CompiledPolicies& compiled) {
  const auto& paths = options["text"].as<std::vector<std::string>>();
  EvalOptions how{.max_tokens = count_from(options, "max-tokens", 0, 1 << 30),
                  .threads = threads_from(options),
                  .names = text_names(paths),
                  .progress = progress_bar("deploy: end-to-end evaluation")};
  std::vector<CacheConfig> configs{CacheConfig{}};  // the full cache
  for (std::size_t i = 0; i < std::min(confirms(options), ballot.standings().size()); ++i)
    configs.push_back(config_of(run, ballot, metric_table, i, compiled));
  how.before = model.tokenizer.before();
  const std::size_t max_tokens = how.max_tokens ? how.max_tokens + how.before.size() : kAllTokens;
  std::vector<std::vector<std::int32_t>> texts;
  texts.reserve(paths.size());
  for (const std::string& path : paths)
    texts.push_back(ids_of_file(path, model.tokenizer, max_tokens));
  say_of_model(model.backend->config(), model.tokenizer);
  Evaluation evaluation =
      evaluate(model.backend->config(), model.run_sweep, texts, std::move(configs), how);
  for (const std::string& warning : eval_warnings(evaluation))
    fmt::print(stderr, "kvlab deploy: {}\n", warning);
  return evaluation;
}

/// Measures the task accuracy of the confirmed standings, and makes the best by both criteria the
/// ballot's winner.
nlohmann::json decide_by_both_criteria(const po::variables_map& options, const EvalModel& model,
                                       const std::vector<Confirmed>& confirmed, Ballot& ballot) {
  TaskAccuracyPlan plan = task_accuracy_plan_from(options);
  if (!plan.tasks.empty()) plan.chat = read_chat_frame(model.directory);
  find_lengths(*model.backend, model.tokenizer, plan);
  std::vector<Confirmed> order = confirmed;  // lowest KL first
  std::ranges::stable_partition(
      order, [&](const Confirmed& entry) { return entry.standing == ballot.winner; });
  std::vector<Finalist> finalists;
  std::erase_if(order, [&](const Confirmed& entry) {
    return entry.over_budget && entry.standing != ballot.winner;
  });
  for (const Confirmed& entry : order) finalists.push_back({entry.score.config, entry.score.kl});
  std::vector<TaskAccuracy> evaluated;
  if (!plan.tasks.empty())
    evaluated = evaluate_finalists(*model.backend, model.tokenizer, finalists, plan,
                                   progress_bar("deploy: task accuracy"));
  const Choice choice = choose_by_both_criteria(finalists, evaluated);
  ballot.winner = order[choice.deployed].standing;
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

int run(const po::variables_map& options) {
  refuse_without(options, "confirm",
                 {"model", "text", "max-tokens", "device", "task", "words", "samples", "features"});
  const std::string directory =
      required(options, "run", "kvlab deploy RUN, a directory of `kvlab replay`");
  const std::string budget = required(options, "budget", "--budget B, one of the run's budgets");
  const std::string out = required(options, "out", "--out policy.json");
  refuse_unwritable(out, "--out");
  const OutputClaim claim(out);
  const Run loaded = load_run(directory);
  const MetricTable metric_table(loaded.rows);
  Ballot ballot =
      rank_for_deployment(loaded, metric_table, budget,
                          options.count("metric") ? options["metric"].as<std::string>()
                                                  : std::string(best_metric(loaded.rows)));
  if (const std::string why = best_metric_text(loaded.rows);
      !why.empty() && !options.count("metric"))
    fmt::print(stderr, "kvlab deploy: {}\n", why);
  const auto compiled = policy_sources_from(options);
  nlohmann::json evidence = "unknown";
  if (options.count("fidelity"))
    evidence =
        fidelity_evidence(options["fidelity"].as<std::string>(), std::string(ballot.metric->name),
                          ballot.budget.min_tokens, loaded.info.traces.front().weights_xxh3);
  const std::optional<EvalModel> model = model_from(options, loaded);
  std::vector<Confirmed> confirmed;
  nlohmann::json criteria{
      {"answers", nullptr},
      {"why", "Task accuracy was not evaluated; add --confirm K to evaluate the best K"}};
  Evaluation evaluation;
  if (model) {
    evaluation = evaluate_first(options, *model, loaded, metric_table, ballot, compiled);
    confirmed = confirm(evaluation, ballot);
    criteria = decide_by_both_criteria(options, *model, confirmed, ballot);
  }
  PolicyFile file = policy_file_of(loaded, metric_table, ballot, compiled);
  file.run["fidelity"] = evidence;
  if (!confirmed.empty()) file.run["confirmed"] = confirmed_json(confirmed, metric_table, ballot);
  file.run["criteria"] = criteria;
  write_policy_file(out, file);

  if (options["json"].as<bool>()) {
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
    const auto judged = evaluation.judged(evaluation.scores[1].config.budget.text());
    print_recommended(judged.recommendation);
    print_candidates(judged.recommendation);
  }
  fmt::print("\n{}",
             model ? criteria_text(criteria) : criteria.at("why").get<std::string>() + "\n");
  fmt::print("\n{}\n", evidence.is_object()
                           ? evidence_text(evidence)
                           : fmt::format("How well {} predicts this model's end-to-end KL is not "
                                         "known; kvlab fidelity measures it.",
                                         ballot.metric->name));
  std::string sources;  // reading the file again needs them
  if (options.count("policy-source"))
    for (const auto& source : options["policy-source"].as<std::vector<std::string>>())
      sources += " --policy-source " + source;
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
      .add_options = add_options,
      .positional = "run",
      .run = run};
}

}  // namespace kvlab
