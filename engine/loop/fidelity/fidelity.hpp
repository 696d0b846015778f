// `kvlab fidelity`: does a figure of the open loop order policies as the closed loop does?
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "engine/loop/eval.hpp"

namespace kvlab {

/// What one text showed, by configuration.
struct FidelityText {
  std::string name;
  std::vector<double> kl;                              ///< mean nats to the full cache, closed loop
  std::map<std::string, std::vector<double>> figures;  ///< of the open loop, by metric
};

/// How one figure does among the configurations of one budget.
struct FidelityBudget {
  std::string budget;
  double rho;                ///< Spearman's, of the means over texts
  Interval rho_interval;     ///< 95%, texts drawn anew; NaN where there is one text
  double rho_single;         ///< the mean of the texts' own
  double regret;             ///< KL of the figure's first over the least KL, means over texts
  double worst_regret;       ///< the largest of the texts' own
  std::size_t chosen, best;  ///< configurations
};

struct FidelityMetric {
  std::string metric;
  std::vector<FidelityBudget> within;  ///< by budget, as in the grid
  double pooled;                       ///< Spearman's rho over all budgets, of the means over texts
};

struct Fidelity {
  std::vector<FidelityMetric> metrics;
  /// KL on one text against KL on another, the mean of all pairs: what no figure of one text can
  /// be expected to exceed; by budget, NaN where there is one text.
  std::vector<double> ceiling;
};

/// Throws std::invalid_argument where a budget has fewer than three configurations, or one that
/// never evicts.
void check_fidelity_grid(std::span<const CacheConfig> configs);
/// Of a grid that check_fidelity_grid() takes.
Fidelity assess_fidelity(std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

struct FidelityOptions {
  std::uint32_t prompt_tokens = 512;
  const OutputSketch& sketch;    ///< of the model's output projections
  std::filesystem::path traces;  ///< where they are left, a folder that is there
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  std::function<void(double)> progress;
};

/// One text: captured, replayed, and run in the closed loop, all over the same ids.
FidelityText measure_fidelity(Backend& backend, const Sweep& sweep, const std::string& name,
                              const std::vector<std::int32_t>& ids,
                              std::span<const CacheConfig> configs, const FidelityOptions& options);

}  // namespace kvlab
