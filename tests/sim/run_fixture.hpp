// A small made-up run: two traces, two heads, policies with simple metrics.
#pragma once

#include <cmath>

#include "sim/run/run.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

struct MadeUp {
  std::string policy, params;
  double nll;    ///< at budget 64, first trace
  double error;  ///< standard error
};

inline ResultRow made_up_row(const MadeUp& policy, const std::string& trace,
                             const std::string& budget, const std::string& metric, double value,
                             std::int32_t layer = -1, std::int32_t head = -1) {
  const bool all = budget == "all";
  return {.trace = trace,
          .policy = policy.policy,
          .params = policy.params,
          .budget = budget,
          .budget_tokens = all ? 1000 : static_cast<std::uint32_t>(std::stoul(budget)),
          .prefill = "dense",
          .positions = "original",
          .queries = "decode",
          .threshold = 0.01,
          .layer = layer,
          .head = head,
          .metric = metric,
          .value = value,
          .standard_error = policy.error,
          .count = 100};
}

/// Sixteen blocks around `value` whose mean has the standard error `error`. Blocks with different
/// `row` numbers (1 to 15) are uncorrelated.
inline std::vector<double> made_up_blocks(double value, double error, unsigned row) {
  std::vector<double> blocks;
  for (unsigned b = 0; b < 16; ++b)
    blocks.push_back(value + (__builtin_popcount(b & row) % 2 ? 1 : -1) * error * std::sqrt(15.0));
  return blocks;
}

/// A run of every policy at budgets of 64 and 128 tokens. At 128 tokens the loss is half of that at
/// 64. From trace to trace the loss grows by 0.1.
inline Run made_up_run(const std::vector<MadeUp>& policies, int traces = 1) {
  Run run{.info = {.version = "0.1.0"}};
  for (int t = 0; t < traces; ++t) {
    const std::string name = "trace" + std::to_string(t);
    run.info.traces.push_back({.name = name,
                               .path = "traces/" + name,
                               .hash = "0123456789abcde" + std::string(1, "f012345678"[t]),
                               .tokens = 1000,
                               .prompt_tokens = 500,
                               .model = "tiny",
                               .dtype = "float32",
                               .layers = 1,
                               .query_heads = 4,
                               .kv_heads = 2,
                               .head_size = 64,
                               .weights_xxh3 = "fedcba9876543210",
                               .tokenizer_xxh3 = "",
                               .capture = nlohmann::json{{"engine", "kvlab"}}});
    for (const MadeUp& policy : policies)
      for (const char* budget : {"64", "128"}) {
        const bool full = policy.policy == "full";
        if (full && std::string(budget) == "128") continue;
        const double nll = full ? 0 : (policy.nll + 0.1 * t) * 64 / std::stod(budget);
        for (int head = -1; head < 2; ++head) {
          const auto add = [&](const char* metric, double value) {
            run.rows.push_back(made_up_row(policy, name, full ? "all" : budget, metric, value,
                                           head < 0 ? -1 : 0, head));
            ResultRow& row = run.rows.back();
            row.text = run.info.traces.back().hash;
            if (head < 0 && !std::isnan(policy.error))
              row.blocks = made_up_blocks(
                  value, policy.error, static_cast<unsigned>(&policy - policies.data() + 1) % 16);
          };
          add("recall", std::exp(-nll));
          add("nll_recall", nll);
          add("miss_rate", nll / 2);
          if (policy.policy != "oracle_topk") add("output_error", nll);
        }
      }
  }
  return run;
}

}  // namespace kvlab
