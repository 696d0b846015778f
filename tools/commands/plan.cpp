#include "sim/plan/format_plan.hpp"

#include "engine/evaluation/eval.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

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
  std::vector<std::string> traces;
  PlanRequest plan;
  std::string centre, out;
  std::vector<std::string> confirm;  // texts
  std::string model;                 // for --confirm
  std::uint32_t max_tokens = 1024;   // of each text of --confirm
  CommonOptions common;
};

/// Whether kvlab runs the plans itself.
bool is_of_kvlab(const FormatSet& set) {
  return set.name.empty() || set.name == "kvlab" || set.name == "cuda";
}

void check(Request& request, const GivenOptions& given) {
  given.require("trace", "--trace TRACE, a captured trace");
  given.require("budget", "--budget B, such as 4.5bits or 25%bytes");
  given.require("out", "--out plan.json");
  refuse_unwritable(request.out, "--out");
  if (!given.has("formats")) request.plan.set = format_sets().front();
  if (!request.centre.empty()) request.plan.centre = parse_key_centre(request.centre);
  if (request.plan.centre != KeyCentre::none && !is_of_kvlab(request.plan.set))
    throw std::invalid_argument(
        fmt::format("--centre: {} does not centre keys; leave it out, or plan with --formats kvlab",
                    request.plan.set.name));
  if (request.confirm.empty()) {
    given.refuse({"model", "max-tokens", "device"}, "only --confirm uses it");
  } else {
    require_model(given, request.model);
    if (!is_of_kvlab(request.plan.set))
      throw std::invalid_argument(
          fmt::format("--confirm: kvlab's engine does not run the formats of {}; leave --confirm "
                      "out, or plan with --formats kvlab",
                      request.plan.set.name));
  }
  request.plan.threads = request.common.threads;
}

void add_options(OptionTable& table, Request& request) {
  table.texts("trace", "TRACE", Takes::several_words, request.traces,
              "captured traces of one model; may be given several times");
  table.parsed("budget", "B", request.plan.bits, parse_plan_bits,
               "mean number of bits for each element of keys and values, including scales and "
               "minima: 4.5bits, or a share such as 25%bytes, where 100% is 16 bit");
  table.parsed(
      "formats", "SET", request.plan.set, parse_format_set,
      "formats to choose from: kvlab, cuda (those that kvlab also has on CUDA), vllm, "
      "llama.cpp, tensorrt-llm, transformers (what that engine can do), or a list such as 16,8,4",
      "kvlab");
  table.text("centre", "none|prompt", request.centre,
             "centre keys before they are quantized (default: none)");
  table.parsed("queries", "decode|all", request.plan.queries, parse_queries,
               "queries to measure: those of decoded tokens, or all", "decode");
  table.text("metric", "METRIC", request.plan.metric,
             "loss to minimise: kl_estimate, which needs gradients, or residual_error (default: "
             "kl_estimate if all traces have gradients)");
  table.text("out", "FILE", request.out,
             "file of the plan, for --tiers @FILE; an existing file is replaced");
  table.texts("confirm", "FILE...", Takes::several_words, request.confirm,
              "evaluate the plan and the best single format end to end on these texts, and write "
              "the one with the lower KL; use other texts than those of the traces");
  add_model_option(table, request.model);
  table.whole("max-tokens", "T", Range{64, 1 << 20}, request.max_tokens,
              "with --confirm: tokens of each text; the first half is the prompt");
  add_common_options(table, request.common);
}

std::string loss_text(const PlanLoss& loss) {
  if (std::isnan(loss.standard_error)) return number_text(loss.value);
  return fmt::format("{} ± {}", number_text(loss.value), number_text(loss.standard_error));
}

/// One line for each run of layers with equal formats.
void print_layers(const FormatPlan& plan) {
  const TierPlan& tier_plan = plan.chosen().tier_plan;
  const auto format_of = [&](std::size_t layer) {
    return tier_plan.is_by_layer() ? tier_plan.layers[layer] : tier_plan.tiers.front().format;
  };
  fmt::print("{:<12} {:>9} {:>9} {:>6}\n", "layers", "keys", "values", "bits");
  for (std::size_t begin = 0, end; begin < plan.layers.size(); begin = end) {
    const KvFormat format = format_of(begin);
    for (end = begin + 1; end < plan.layers.size() && format_of(end) == format;) ++end;
    const std::string layers =
        end - begin == 1 ? fmt::format("{}", plan.layers[begin])
                         : fmt::format("{} to {}", plan.layers[begin], plan.layers[end - 1]);
    fmt::print("{:<12} {:>9} {:>9} {:>6.2f}\n", layers, format.key->name, format.value->name,
               format.bits());
  }
}

/// The text on the right of `columns` columns. "±" has two bytes, but takes one column.
std::string right_aligned(const std::string& text, std::size_t columns) {
  const bool has_sign = text.find("±") != std::string::npos;
  return fmt::format("{:>{}}", text, columns + has_sign);
}

/// Measures KL of the plan and of the best single format on the texts of --confirm.
void confirm(const Request& request, FormatPlan& plan) {
  const EvalModel model = load_eval_model(request.model, request.common);
  if (const std::string own = model.backend->weights_xxh3(); own != plan.weights_xxh3)
    throw std::invalid_argument(
        fmt::format("--model: {} has the weights {}, but the traces are of {} with the weights {}; "
                    "give the checkpoint that was captured",
                    request.model, own, plan.model, plan.weights_xxh3));
  EvalOptions how{.window = request.max_tokens, .before = model.tokenizer.before()};
  how.max_tokens = request.max_tokens;
  std::vector<std::vector<std::int32_t>> texts;
  for (const std::string& path : request.confirm)
    texts.push_back(ids_of_file(path, model.tokenizer, how.max_tokens + how.before.size()));
  how.names = text_names(request.confirm);
  how.threads = request.common.threads;
  how.progress = progress_bar("confirm");
  const auto measure = [&](FormatChoice& choice) {
    if (!choice.tier_plan.is_quantized()) {  // the full cache itself
      choice.measured = {0, 0};
      return;
    }
    CacheConfig config;
    config.policy.tier_plan = choice.tier_plan;
    config.policy.centre = request.plan.centre;
    const Evaluation evaluation =
        evaluate(model.backend->config(), model.run_sweep, texts, {config}, how);
    choice.measured = {evaluation.scores.back().kl, evaluation.scores.back().kl_error};
  };
  measure(plan.plan);
  if (plan.uniform.tier_plan.text() == plan.plan.tier_plan.text())
    plan.uniform.measured = plan.plan.measured;
  else
    measure(plan.uniform);
}

void print_confirmation(const FormatPlan& plan, const Request& request) {
  fmt::print(
      "\nmeasured KL: mean over {}, each of at most {} tokens, against the full cache in 16 bit\n",
      request.confirm.size() == 1 ? "one text" : fmt::format("{} texts", request.confirm.size()),
      request.max_tokens);
  if (plan.metric == "kl_estimate" && plan.plan.joint.value > 0)
    fmt::print("measured / predicted: {:.2f}\n", plan.plan.measured.value / plan.plan.joint.value);
  fmt::print("{}: {}, which has the lower measured KL\n", request.out,
             plan.chosen().tier_plan.text());
  fmt::print("Next: kvlab generate --model {} --prompt TEXT --policy full --tiers @{}\n",
             request.model, request.out);
}

void print(const FormatPlan& plan, const Request& request) {
  const double bits = request.plan.bits;
  fmt::print("{}, {} {}: formats of at most {:.4g} bits per element, by {}\n\n", plan.model,
             request.traces.size(), request.traces.size() == 1 ? "trace" : "traces", bits,
             plan.metric);
  print_layers(plan);
  const std::string joint = plan.metric == "kl_estimate" ? "kl_estimate_joint" : plan.metric;
  const bool confirmed = !request.confirm.empty();
  fmt::print("\n{:<20} {:>5} {:>13} {:>19}{}\n", "", "bits", "sum of losses", joint,
             confirmed ? "        measured KL" : "");
  const auto line = [confirmed](const std::string& name, const FormatChoice& choice) {
    fmt::print("{:<20} {:>5.2f} {:>13} {}{}\n", name, choice.bits, number_text(choice.added),
               right_aligned(loss_text(choice.joint), 19),
               confirmed ? right_aligned(loss_text(choice.measured), 19) : "");
  };
  line("this plan", plan.plan);
  line(fmt::format("{} in all layers", plan.uniform.tier_plan.text()), plan.uniform);
  fmt::print("\nplans of other sizes, by their sums of losses\n");
  fmt::print("{:>6} {:>14}\n", "bits", "sum of losses");
  for (const FormatChoice& choice : plan.frontier)
    if (choice.bits <= 9.05)
      fmt::print("{:>6.2f} {:>14}\n", choice.bits, number_text(choice.added));
  if (confirmed) {
    print_confirmation(plan, request);
    return;
  }
  const bool centres = request.plan.centre != KeyCentre::none && plan.plan.tier_plan.is_quantized();
  const std::string centre = centres ? " --centre prompt" : "";
  fmt::print(
      "\n{}: offline estimates; confirm them on another text:\n"
      "Next: kvlab eval --model DIR --text OTHER --policy full --tiers @{} --tiers {}{}\n",
      request.out, request.out, plan.uniform.tier_plan.text(), centre);
}

int run(const Request& given) {
  const OutputClaim claim(given.out);
  PlanRequest request = given.plan;
  request.progress = progress_bar("plan");
  std::vector<TraceReader> traces;
  for (const std::string& path : given.traces)
    traces.push_back(open_verified_trace(path, given.common.threads));
  std::vector<const TraceReader*> pointers;
  for (const TraceReader& trace : traces) pointers.push_back(&trace);
  FormatPlan plan = plan_formats(pointers, request);
  if (!given.confirm.empty()) confirm(given, plan);
  const std::string text = plan_text(plan, request);
  write_file_atomically(given.out, text);
  if (given.common.json)
    fmt::print("{}", text);
  else
    print(plan, given);
  return 0;
}

}  // namespace

Command plan_command() {
  return {.name = "plan",
          .summary = "chooses a storage format for the keys and values of each layer",
          .usage = "--trace TRACE... --budget B [--formats SET] --out plan.json",
          .example = "kvlab plan --trace trace --budget 4bits --out plan.json",
          .prepare = prepared(add_options, check, run)};
}

}  // namespace kvlab
