#include <fmt/format.h>

#include <algorithm>

#include "sim/budgets/allocate.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void add_options(po::options_description& options) {
  auto add = options.add_options();
  add("run", text_option("RUN"), "a directory of `kvlab replay`");
  add("budget", text_option("B"), "mean budget of a head: tokens, or a share of the length");
  add("policy", text_option("P"),
      "which policy's curves to use; needed if the run has several policies");
  add("metric", text_option("METRIC"),
      "metric of the curves: residual_error or kl_estimate (default: kl_estimate if the run has "
      "it)");
  add("out", text_option("FILE"),
      "file of the budgets, for --budget @FILE; an existing file is replaced");
  add("json", po::bool_switch(), "print one JSON object");
}

Budget mean_from(const po::variables_map& options) {
  const Budget mean = parse_budget(required(options, "budget", "--budget B, tokens or a share"));
  if (!mean.is_even() || mean.all)
    throw std::invalid_argument(fmt::format(
        "--budget: {} should be tokens or a share of the length, as the mean over heads",
        mean.text()));
  return mean;
}

std::string text_from(const po::variables_map& options, const char* name) {
  return options.count(name) ? options[name].as<std::string>() : "";
}

void print(const Allocation& allocation, const std::string& out) {
  fmt::print("{} by {}: {} tokens per head on average\n", allocation.policy, allocation.metric,
             allocation.mean_tokens);
  fmt::print("{:>5} {:>8} {:>8} {:>8}\n", "layer", "least", "mean", "most");
  for (std::size_t l = 0; l < allocation.heads.size(); ++l) {
    const auto& heads = allocation.heads[l];
    fmt::print("{:>5} {:>8} {:>8} {:>8}\n", l, std::ranges::min(heads), mean_budget({heads}),
               std::ranges::max(heads));
  }
  fmt::print(
      "{} by these curves: {:.4g} with one budget for all heads, {:.4g} with these budgets\n",
      allocation.metric, allocation.even, allocation.shared);
  fmt::print("\n{}: next: kvlab eval --model DIR --text OTHER --policy P --budget {},@{}\n", out,
             allocation.mean_tokens, out);
}

int run(const po::variables_map& options) {
  const std::string directory =
      required(options, "run", "kvlab allocate RUN, a directory of `kvlab replay`");
  const Budget mean = mean_from(options);
  const std::string out = required(options, "out", "--out budgets.json");
  refuse_unwritable(out, "--out");
  const OutputClaim claim(out);
  const Allocation allocation =
      allocate_budgets(load_run(directory), {.policy = text_from(options, "policy"),
                                             .metric = text_from(options, "metric"),
                                             .budget = mean});
  write_file_atomically(out, budgets_text(allocation.heads));
  if (options["json"].as<bool>())
    print_json({{"budgets_file", out},
                {"policy", allocation.policy},
                {"metric", allocation.metric},
                {"budget_tokens", allocation.mean_tokens},
                {"even", allocation.even},
                {"allocated", allocation.shared},
                {"budgets", allocation.heads}});
  else
    print(allocation, out);
  return 0;
}

}  // namespace

Command allocate_command() {
  return {.name = "allocate",
          .summary = "chooses a budget for each head from a run's errors",
          .usage = "RUN --budget B [--policy P] [--metric METRIC] --out budgets.json",
          .example = "kvlab allocate run --budget 20% --policy h2o --out budgets.json",
          .add_options = add_options,
          .positional = "run",
          .run = run};
}

}  // namespace kvlab
