#include "sim/plan/format_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "sim/report/text.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

struct Request {
  std::vector<std::string> traces;
  PlanRequest plan;
  std::string centre, out;
  unsigned threads = 1;
  bool json = false;
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
  request.plan.threads = request.threads;
}

void add_options(OptionTable& table, Request& request) {
  table.texts("trace", "TRACE", Takes::several_words, request.traces,
              "captured traces of one model; may be given several times");
  table.parsed("budget", "B", request.plan.bits, parse_plan_bits,
               "mean precision of the cache, with scales and minima: 4.5bits, or a share of the "
               "bytes in 16 bit such as 25%bytes");
  table.parsed("formats", "SET", request.plan.set, parse_format_set,
               "formats to choose from: kvlab, cuda (those that kvlab also has on CUDA), vllm, "
               "llama.cpp, tensorrt-llm (what that engine can do), or a list such as 16,8,4",
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
  add_threads_option(table, request.threads);
  add_json_option(table, request.json);
}

std::string loss_text(const PlanLoss& loss) {
  if (std::isnan(loss.standard_error)) return number_text(loss.value);
  return fmt::format("{} ± {}", number_text(loss.value), number_text(loss.standard_error));
}

/// One line for each run of layers with equal formats.
void print_layers(const FormatPlan& plan) {
  const TierPlan& tier_plan = plan.plan.tier_plan;
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

void print(const FormatPlan& plan, const Request& request) {
  const double bits = request.plan.bits;
  fmt::print("{}, {} {}: formats of at most {:.4g} bits per element, by {}\n\n", plan.model,
             request.traces.size(), request.traces.size() == 1 ? "trace" : "traces", bits,
             plan.metric);
  print_layers(plan);
  const std::string joint = plan.metric == "kl_estimate" ? "kl_estimate_joint" : plan.metric;
  fmt::print("\n{:<26} {:>6} {:>14} {:>24}\n", "", "bits", "sum of losses", joint);
  const auto line = [](const std::string& name, const FormatChoice& choice) {
    // "±" has two bytes, but takes one column.
    const std::string joint_text = loss_text(choice.joint);
    const int wide = joint_text.find("±") == std::string::npos ? 24 : 25;
    fmt::print("{:<26} {:>6.2f} {:>14} {:>{}}\n", name, choice.bits, number_text(choice.added),
               joint_text, wide);
  };
  line("this plan", plan.plan);
  line(fmt::format("{} in all layers", plan.uniform.tier_plan.text()), plan.uniform);
  fmt::print("\nplans of other sizes, by their sums of losses\n");
  fmt::print("{:>6} {:>14}\n", "bits", "sum of losses");
  for (const FormatChoice& choice : plan.frontier)
    if (choice.bits <= 9.05)
      fmt::print("{:>6.2f} {:>14}\n", choice.bits, number_text(choice.added));
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
    traces.push_back(open_verified_trace(path, given.threads));
  std::vector<const TraceReader*> pointers;
  for (const TraceReader& trace : traces) pointers.push_back(&trace);
  const FormatPlan plan = plan_formats(pointers, request);
  const std::string text = plan_text(plan, request);
  write_file_atomically(given.out, text);
  if (given.json)
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
