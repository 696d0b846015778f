#include "tools/commands/plan_heads.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "sim/budgets/budget_file.hpp"
#include "tools/options.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

void print(const Allocation& allocation, const std::string& out) {
  fmt::print("{} by {}: {} tokens per head on average\n", allocation.policy, allocation.metric,
             allocation.mean_tokens);
  fmt::print("{:>5} {:>8} {:>8} {:>8}\n", "layer", "min", "mean", "max");
  for (std::size_t l = 0; l < allocation.heads.size(); ++l) {
    const auto& heads = allocation.heads[l];
    fmt::print("{:>5} {:>8} {:>8} {:>8}\n", allocation.layers[l], std::ranges::min(heads),
               mean_budget({heads}), std::ranges::max(heads));
  }
  fmt::print("predicted {}: {:.4g} with one budget for all heads, {:.4g} with these budgets\n",
             allocation.metric, allocation.even, allocation.shared);
  fmt::print(
      "\n{}: budgets of all heads\nNext: kvlab eval --model DIR --text OTHER --policy P "
      "--budget {},@{}\n",
      out, allocation.mean_tokens, out);
}

}  // namespace

Budget parse_mean_budget(const std::string& text) {
  const Budget mean = parse_budget(text);
  if (!mean.is_even() || mean.all)
    throw std::invalid_argument(fmt::format(
        "--budget: {} should be tokens or a share of the length; it is the mean over all heads",
        mean.text()));
  return mean;
}

int plan_heads(const HeadsRequest& request) {
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
                {"layers", allocation.layers},
                {"budgets", allocation.heads}});
  else
    print(allocation, out);
  return 0;
}

}  // namespace kvlab
