#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <optional>

#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/pages.hpp"
#include "sim/report/page.hpp"
#include "tools/command.hpp"
#include "tools/eval_model.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/work_plan.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

struct Request {
  EvalModelOptions model;
  CacheOptions caches;
  CommonOptions common;
  std::string out, report;
};

void check(Request& request, const GivenOptions& given) {
  given.require("out", "--out OUT, a new directory");
  refuse_existing(request.out, "--out");
  if (given.has("report")) refuse_unwritable(request.report, "--report");
  require_model(given, request.model.model);
}

void add_options(OptionTable& table, Request& request) {
  add_eval_model_options(table, request.model);
  table.text("out", "OUT", request.out,
             "new directory for fidelity.csv, fidelity.json and a trace of each text");
  table.text("report", "FILE", request.report, "also write the page that `kvlab report OUT` makes");
  add_cache_options(table, request.caches, true);
  add_common_options(table, request.common);
}

void print_table(const Fidelity& fidelity) {
  fmt::print(
      "Spearman's rho with the end-to-end KL, within a budget (regret in parentheses)\n\n{:<16}",
      "");
  for (const FidelityBudget& budget : fidelity.metrics.front().within)
    fmt::print(" {:>14}", budget.budget);
  fmt::print(" {:>9}\n", "pooled");
  for (const FidelityMetric& metric : fidelity.metrics) {
    fmt::print("{:<16}", metric.metric);
    for (const FidelityBudget& budget : metric.within)
      fmt::print(" {:>14}", fmt::format("{:.2f} ({:.2f})", budget.rho, budget.regret));
    fmt::print(" {:>9.2f}\n", metric.pooled);
  }
  fmt::print("{:<16}", "KL between texts");
  for (const double rho : fidelity.ceiling)
    fmt::print(" {:>14}", std::isnan(rho) ? "-" : fmt::format("{:.2f}", rho));
  fmt::print("\n");
  if (const FidelityMetric* const standard = fidelity.find(fidelity.standard)) {
    fmt::print(
        "\n`kvlab deploy` chooses by {}. It puts these pairs in the wrong order, of all pairs that "
        "differ significantly in KL:",
        standard->metric);
    for (const FidelityBudget& budget : standard->within)
      fmt::print("{} {} of {} at {}", &budget == standard->within.data() ? "" : ",",
                 budget.misordered.size(), budget.significantly_different, budget.budget);
    fmt::print("\n");
  }
}

/// Returns the configurations that can run on every text (protected tokens, for example, have to
/// fit the budget). Throws if too few configurations are left at a budget.
std::vector<CacheConfig> fitting(std::vector<CacheConfig> configs,
                                 const std::vector<EvalText>& texts, const CacheShape& model,
                                 const LeaveOut& leave_out) {
  configs = configs_that_fit(
      std::move(configs),
      [&](const CacheConfig& config) {
        for (const EvalText& text : texts)
          resolve(config.at_prompt(text.prompt_tokens), static_cast<std::uint32_t>(text.ids.size()),
                  0, model);
      },
      leave_out);
  check_fidelity_sweep(configs);
  return configs;
}

/// Runs each text in the offline replay and in the end-to-end evaluation. Traces of texts are
/// written to `traces`.
std::vector<FidelityText> measure(const Request& request, const EvalModel& model,
                                  const std::vector<EvalText>& texts,
                                  std::span<const CacheConfig> configs,
                                  const std::filesystem::path& traces) {
  const unsigned threads = request.common.threads;
  const OutputSketch sketch = output_sketch(model.directory, kSketchSeed, threads);
  const auto replayer = eval_replayer(request.common.device);
  std::uint64_t captured = 0;
  for (const EvalText& text : texts) captured += text.trace ? 0 : text.ids.size();
  announce_traces("fidelity", model.backend->trace_header({}).shape, captured,
                  "into " + traces.string());
  enum Kind { kCapture, kReplay, kEvaluation };
  std::vector<WorkPhase> phases;
  for (const EvalText& text : texts) {
    const auto tokens = static_cast<double>(text.ids.size());
    phases.push_back({kCapture, text.trace ? 0 : tokens});
    phases.push_back({kReplay, tokens});
    phases.push_back({kEvaluation, tokens * static_cast<double>(configs.size() + 1)});
  }
  const double rate = end_to_end_rate(model.run_sweep, texts.front(), threads);
  WorkPlan plan(progress_bar("fidelity"), std::move(phases), {rate, 0, rate});
  std::vector<FidelityText> measured;
  for (std::size_t t = 0; t < texts.size(); ++t) {
    ReplayMetrics replay_metrics =
        run_offline_replay(*model.backend, texts[t], configs,
                           {.sketch = sketch,
                            .capture = traces / texts[t].name,
                            .every_output_error = request.model.every_output_error,
                            .threads = threads,
                            .device = replayer.get(),
                            .capturing = plan.phase(3 * t + kCapture),
                            .progress = plan.phase(3 * t + kReplay)});
    auto scores = end_to_end_scores(model.run_sweep, texts[t], configs, threads,
                                    plan.phase(3 * t + kEvaluation));
    measured.push_back(
        fidelity_text(texts[t], kl_of(std::move(scores)), std::move(replay_metrics)));
  }
  return measured;
}

int run(const Request& request) {
  const std::string &out = request.out, &report = request.report;
  std::optional<OutputClaim> claim;
  if (!report.empty()) claim.emplace(report);
  const LeaveOut leave_out = report_omissions("fidelity");
  std::vector<CacheConfig> configs =
      sweep_of(request.caches, compiled_policies(request.caches, request.common), leave_out);
  check_fidelity_sweep(configs);
  AtomicFolder folder(out);
  const EvalModel model = load_eval_model(request.model.model, request.common);
  const std::vector<EvalText> texts = eval_texts(request.model, model, request.common.threads);
  configs = fitting(std::move(configs), texts, model.backend->config().heads(), leave_out);
  const std::filesystem::path traces = folder / "traces";
  if (!request.model.texts.empty()) std::filesystem::create_directory(traces);
  const std::vector<FidelityText> measured = measure(request, model, texts, configs, traces);
  const Fidelity fidelity = assess_fidelity(configs, measured);

  ordered_json json = {{"format", kFidelityFormat},
                       {"model", model.backend->config().name},
                       {"weights_xxh3", model.backend->weights_xxh3()},
                       {"kvlab", KVLAB_RELEASE}};
  add_fidelity(json, fidelity, configs, measured);
  write_file_atomically(folder / kFidelityCsv,
                        fidelity_csv(configs, measured, model.backend->config().head_size));
  write_file_atomically(folder / kFidelityJson, json_text(json, 1) + "\n");
  folder.commit();
  if (!report.empty() && !vega_script()) fmt::print(stderr, "kvlab fidelity: {}\n", kNoVega);
  if (!report.empty()) write_file_atomically(report, page_html(fidelity_page(out).page));
  if (request.common.json)
    print_json(json);
  else
    print_table(fidelity);
  return 0;
}

}  // namespace

Command fidelity_command() {
  return {.name = "fidelity",
          .summary = "measures which replay metric predicts a model's end-to-end KL",
          .usage =
              "--model DIR [--text FILE...] [--trace TRACE...] --policy LIST --budget LIST --out "
              "OUT [options]",
          .example =
              "kvlab fidelity --model engine/models/tiny --text tools/demo/prompt.txt "
              "--policy window,sink,lru,h2o --budget 64,128 --prompt-tokens 128 --max-tokens 512 "
              "--out fidelity",
          .prepare = make_prepare(add_options, check, run)};
}

}  // namespace kvlab
