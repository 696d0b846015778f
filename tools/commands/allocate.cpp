#include <fmt/format.h>

#include <algorithm>

#include "sim/budgets/allocate.hpp"
#include "sim/budgets/budget_file.hpp"
#include "tools/command.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

struct Request {
  std::string run, out;
  AllocationRequest allocation;
  bool json = false;
};

void check(Request& request, const GivenOptions& given) {
  given.require("run", "kvlab allocate RUN, a directory of `kvlab replay`");
  given.require("budget", "--budget B, tokens or a share");
  const Budget& mean = request.allocation.budget;
  if (!mean.is_even() || mean.all)
    throw std::invalid_argument(fmt::format(
        "--budget: {} should be tokens or a share of the length; it is the mean over all heads",
        mean.text()));
  given.require("out", "--out budgets.json");
  refuse_unwritable(request.out, "--out");
}

void add_options(OptionTable& table, Request& request) {
  table.text("run", "RUN", request.run, "a directory of `kvlab replay`");
  table.parsed("budget", "B", request.allocation.budget, parse_budget,
               "mean budget of a head: tokens, or a share of the length");
  table.text("policy", "P", request.allocation.policy,
             "which policy's curves to use; needed if the run has several policies");
  table.text("metric", "METRIC", request.allocation.metric,
             "metric of the curves: residual_error or kl_estimate (default: kl_estimate if the run "
             "has it)");
  table.text("out", "FILE", request.out,
             "file of the budgets, for --budget @FILE; an existing file is replaced");
  add_json_option(table, request.json);
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
      "{} that the curves predict: {:.4g} with one budget for all heads, {:.4g} with these "
      "budgets\n",
      allocation.metric, allocation.even, allocation.shared);
  fmt::print(
      "\n{}: budgets of all heads\nNext: kvlab eval --model DIR --text OTHER --policy P "
      "--budget {},@{}\n",
      out, allocation.mean_tokens, out);
}

int run(const Request& request) {
  const std::string& out = request.out;
  const OutputClaim claim(out);
  const Allocation allocation = allocate_budgets(load_run(request.run), request.allocation);
  write_file_atomically(out, budgets_text(allocation.heads));
  if (request.json)
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
          .positional = "run",
          .prepare = prepared(add_options, check, run)};
}

}  // namespace kvlab
