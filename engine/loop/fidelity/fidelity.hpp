// `kvlab fidelity`: does a figure of the open loop order policies as the closed loop does?
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/loop/fidelity/measure.hpp"
#include "engine/loop/statistics.hpp"

namespace kvlab {

/// What one text showed, by configuration.
struct FidelityText {
  std::string name;
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::vector<std::vector<double>> kl_tokens;  ///< nats to the full cache, closed loop, by token
  std::vector<double> kl;                      ///< their means
  OpenLoopFigures figures;                     ///< of the open loop, by metric
};
FidelityText fidelity_text(const LoopText& text, std::vector<std::vector<double>> kl_tokens,
                           OpenLoopFigures figures);

/// Two policies that a figure puts in the wrong order.
struct Misordered {
  std::size_t preferred, better;  ///< configurations: the figure's, and the one of less KL
  double ratio;                   ///< KL of the first over that of the second
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
  std::size_t told_apart;    ///< pairs that KL tells apart, by a paired block bootstrap
  std::vector<Misordered>
      misordered;  ///< those of them that the figure gets wrong, the worst first
};

struct FidelityMetric {
  std::string metric;
  std::vector<FidelityBudget> within;  ///< by budget, as in the grid
  double pooled;                       ///< Spearman's rho over all budgets, of the means over texts
};

struct Fidelity {
  std::vector<FidelityMetric> metrics;  ///< those that every text has
  std::string standard;                 ///< the one that `deploy` goes by
  /// KL on one text against KL on another, the mean of all pairs: what no figure of one text can
  /// be expected to exceed; by budget, NaN where there is one text.
  std::vector<double> ceiling;

  const FidelityMetric* find(const std::string& metric) const;
};

/// Throws std::invalid_argument where a budget has fewer than three configurations, or one that
/// never evicts.
void check_fidelity_grid(std::span<const CacheConfig> configs);
/// Of a grid that check_fidelity_grid() takes.
Fidelity assess_fidelity(std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// The figure that `deploy` would go by among those of all texts, [text].
std::string standard_figure(std::span<const OpenLoopFigures> figures);

}  // namespace kvlab
