#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "engine/loop/deploy.hpp"
#include "engine/loop/eval.hpp"
#include "engine/loop/fidelity/table.hpp"
#include "sim/report/html.hpp"
#include "tools/loop_model.hpp"
#include "tools/options.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("run", text_option("RUN"), "a run of `kvlab replay`");
  add("budget", text_option("B"), "a budget of the run");
  add("metric", text_option("METRIC"),
      "what decides: kl_estimate_joint, kl_estimate, residual_error, layer_error, nll_recall, "
      "recall, … (default: the first of the first five that every trace of the run has)");
  add("fidelity", text_option("FILE"),
      "a fidelity.json of `kvlab fidelity`: how well what decides predicted this model");
  add("out", text_option("FILE"), "the policy file; an older one is replaced");
  add("confirm", number_option("K", 0),
      "settle the first K by perplexity in the closed loop (needs --model and --text)");
  add("model", text_option("DIR"), "--confirm: the model");
  add("text", text_option("FILE"), "--confirm: text to score");
  add("max-tokens", number_option("T", 0), "--confirm: use the first T tokens of the text; 0: all");
  add_source_option(options);
  add_common_options(options);
}

/// What the closed loop said of one standing.
struct Confirmed {
  std::size_t standing;
  EvalScore score;
};

std::vector<Confirmed> confirm(const po::variables_map& options, const Run& run,
                               const Figures& figures, const Ballot& ballot,
                               const CompiledPolicies& compiled) {
  std::vector<Confirmed> confirmed;
  const auto most = static_cast<std::size_t>(number_from(options, "confirm", 0, 1 << 20));
  if (most == 0) return confirmed;
  required(options, "model", "--model DIR, which --confirm runs");
  const std::string text = required(options, "text", "--text FILE, which --confirm scores");
  const LoopModel model = load_loop_model(options);
  if (model.backend->weights_xxh3() != run.info.traces.front().weights_xxh3)
    throw std::invalid_argument(fmt::format("--model: {} has other weights than the run's model {}",
                                            model.directory, run.info.traces.front().model));
  std::vector<CacheConfig> configs{CacheConfig{}};  // the full cache
  const std::size_t count = std::min(most, ballot.standings.size());
  for (std::size_t i = 0; i < count; ++i)
    configs.push_back(config_of(run, ballot, figures, i, compiled));
  const auto scores = evaluate(model.backend->config(), model.sweep,
                               {model.tokenizer.encode(read_text(text), false)}, configs,
                               {.max_tokens = count_from(options, "max-tokens", 0, 1 << 30),
                                .threads = threads_from(options),
                                .names = {text},
                                .progress = progress_bar("confirm")})
                          .scores;
  for (std::size_t i = 0; i < count; ++i) confirmed.push_back({i, scores[i + 1]});
  std::stable_sort(confirmed.begin(), confirmed.end(), [](const Confirmed& a, const Confirmed& b) {
    return a.score.nll < b.score.nll;
  });
  return confirmed;
}

ordered_json confirmed_json(const Figures& figures, const Ballot& ballot,
                            const std::vector<Confirmed>& confirmed) {
  ordered_json list = ordered_json::array();
  for (const Confirmed& entry : confirmed)
    list.push_back({{"policy", figures.series()[ballot.standings[entry.standing].series].label},
                    {"perplexity", entry.score.perplexity},
                    {"perplexity_stderr", entry.score.perplexity_error},
                    {"kl", entry.score.kl},
                    {"kl_stderr", entry.score.kl_error},
                    {"tokens", entry.score.tokens}});
  return list;
}

void print_standings(const Figures& figures, const Ballot& ballot) {
  fmt::print("{} at a budget of {} tokens\n", ballot.metric->label, ballot.budget.least_tokens);
  for (std::size_t i = 0; i < ballot.standings.size(); ++i) {
    const Standing& standing = ballot.standings[i];
    const bool first = standing.behind.traces == 0;
    fmt::print("{} {:<30} {:>19}   {}\n", i == ballot.winner ? '>' : ' ',
               figures.series()[standing.series].label, average_text(standing.score),
               first           ? ""
               : standing.ties ? "ties with the first"
                               : "behind by " + average_text(standing.behind));
  }
}

void print_confirmed(const Figures& figures, const Ballot& ballot,
                     const std::vector<Confirmed>& confirmed) {
  if (confirmed.empty()) return;
  fmt::print("\nclosed loop, perplexity and KL to the full cache\n");
  for (const Confirmed& entry : confirmed)
    fmt::print("{} {:<30} {:>19}   {}\n", entry.standing == ballot.winner ? '>' : ' ',
               figures.series()[ballot.standings[entry.standing].series].label,
               average_text({entry.score.perplexity, entry.score.perplexity_error, 1}),
               average_text({entry.score.kl, entry.score.kl_error, 1}));
}

int run(const po::variables_map& options) {
  check_device(options);
  const std::string directory =
      required(options, "run", "kvlab deploy RUN, a directory of `kvlab replay`");
  const std::string budget = required(options, "budget", "--budget B, one of the run");
  const std::string out = required(options, "out", "--out policy.json");
  const Run loaded = load_run(directory);
  const Figures figures(loaded.rows);
  Ballot ballot =
      rank_for_deployment(loaded, figures, budget,
                          options.count("metric") ? options["metric"].as<std::string>()
                                                  : std::string(best_metric(loaded.rows)));
  const auto compiled = policy_sources_from(options);
  nlohmann::json evidence = "unknown";
  if (options.count("fidelity"))
    evidence =
        fidelity_evidence(options["fidelity"].as<std::string>(), std::string(ballot.metric->name),
                          ballot.budget.least_tokens, loaded.info.traces.front().weights_xxh3);
  const auto confirmed = confirm(options, loaded, figures, ballot, compiled);
  if (!confirmed.empty()) ballot.winner = confirmed.front().standing;
  PolicyFile file = policy_file_of(loaded, figures, ballot, compiled);
  file.run["fidelity"] = evidence;
  if (!confirmed.empty()) file.run["confirmed"] = confirmed_json(figures, ballot, confirmed);
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
  print_standings(figures, ballot);
  print_confirmed(figures, ballot, confirmed);
  fmt::print("\n{}\n", evidence.is_object()
                           ? evidence_text(evidence)
                           : fmt::format("{} decides; how well it predicts this model is unknown "
                                         "(kvlab fidelity measures it, --fidelity says it)",
                                         ballot.metric->name));
  fmt::print(
      "\n{}: {} at {} tokens; next: kvlab generate --model DIR --prompt TEXT --policy-file {}\n",
      out, file.cache.policy.text(), file.cache.budget.extent.tokens, out);
  return 0;
}

}  // namespace

Command deploy_command() {
  return {
      .name = "deploy",
      .summary = "the winner of a run at a budget, as a policy file for the engine",
      .usage = "RUN --budget B [--metric METRIC] [--confirm K --model DIR --text FILE] --out FILE",
      .example = "kvlab deploy run --budget 128 --out policy.json",
      .add_options = add_options,
      .positional = "run",
      .run = run};
}

}  // namespace kvlab
