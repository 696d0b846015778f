// `kvlab fidelity`: does a metric of the offline replay order policies as the end-to-end evaluation
// does?
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/evaluation/eval.hpp"
#include "engine/evaluation/statistics.hpp"

namespace kvlab {

// One text in the offline replay and in the end-to-end evaluation, over the same ids.
/// A text by its tokens, or a trace that was captured before, whose ids are the text.
struct EvalText {
  std::string name;
  std::vector<std::int32_t> ids;
  std::uint32_t prompt_tokens = 0;
  std::optional<TraceReader> trace;
};

/// Throws std::runtime_error unless the trace verifies, is of these weights, and holds one prompt
/// and then decoded tokens, two at least.
EvalText text_of_trace(const std::filesystem::path& directory, const std::string& weights_xxh3,
                       unsigned threads);

/// The texts that count, and one line for each two that have text in common: overlaps_of().
struct DistinctTexts {
  std::vector<EvalText> texts;
  std::vector<std::string> warnings;
};
DistinctTexts distinct_texts(std::vector<EvalText> texts);

struct OfflineReplayOptions {
  const OutputSketch& sketch;     ///< of the model's output projections, for captures
  std::filesystem::path capture;  ///< where a trace of the text goes, if it has none; a new folder
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  std::function<void(double)> capturing = {};  ///< the share that is captured; may be empty
  std::function<void(double)> progress = {};   ///< of the replay
};

/// Every metric of the replay by which policies may be put in order, and kv_bytes_mean and _peak:
/// [metric][configuration]; NaN where there is none.
using ReplayMetrics = std::map<std::string, std::vector<double>>;
ReplayMetrics run_offline_replay(Backend& backend, const EvalText& text,
                                 std::span<const CacheConfig> configs,
                                 const OfflineReplayOptions& options);

/// What each configuration scored, and the full cache before them.
std::vector<EvalScores> end_to_end_scores(const SweepRunner& run_sweep, const EvalText& text,
                                          std::span<const CacheConfig> configs, unsigned threads,
                                          std::function<void(double)> progress);

/// KL to the full cache of each scored token, [configuration][token], of all but the first.
std::vector<std::vector<double>> kl_of(std::vector<EvalScores> scores);
/// Seconds that the end-to-end evaluation takes for each token of a configuration, by a run of the
/// full cache over the beginning of a text: what its progress is reckoned from as long as nothing
/// else is known.
double end_to_end_rate(const SweepRunner& run_sweep, const EvalText& text, unsigned threads);

/// What one text showed, by configuration.
struct FidelityText {
  std::string name;
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::vector<std::vector<double>>
      kl_tokens;                 ///< nats to the full cache, end-to-end evaluation, by token
  std::vector<double> kl;        ///< their means
  ReplayMetrics replay_metrics;  ///< of the offline replay, by metric
};
FidelityText fidelity_text(const EvalText& text, std::vector<std::vector<double>> kl_tokens,
                           ReplayMetrics replay_metrics);

/// Two policies that a metric puts in the wrong order.
struct Misordered {
  std::size_t preferred, better;  ///< configurations: the metric's, and the one of less KL
  double ratio;                   ///< KL of the first over that of the second
};

/// How one metric does among the configurations of one budget.
struct FidelityBudget {
  std::string budget;
  double rho;                ///< Spearman's, of the means over texts
  Interval rho_interval;     ///< 95%, texts resampled; NaN where there is one text
  double rho_single;         ///< the mean of the texts' own
  double regret;             ///< KL of the metric's first over the least KL, means over texts
  double worst_regret;       ///< the largest of the texts' own
  std::size_t chosen, best;  ///< configurations
  std::size_t significantly_different;  ///< pairs that differ significantly in KL, by a paired
                                        ///< block bootstrap
  std::vector<Misordered>
      misordered;  ///< those of them that the metric gets wrong, the worst first
};

struct FidelityMetric {
  std::string metric;
  std::vector<FidelityBudget> within;  ///< by budget, as in the sweep
  double pooled;                       ///< Spearman's rho over all budgets, of the means over texts
};

struct Fidelity {
  std::vector<FidelityMetric> metrics;  ///< those that every text has
  std::string standard;                 ///< the one that `deploy` goes by
  /// KL on one text against KL on another, the mean of all pairs: what no metric of one text can
  /// be expected to exceed; by budget, NaN where there is one text.
  std::vector<double> ceiling;

  const FidelityMetric* find(const std::string& metric) const;
};

/// Throws std::invalid_argument where a budget has fewer than three configurations, or one that
/// never evicts.
void check_fidelity_sweep(std::span<const CacheConfig> configs);
/// Of a sweep that check_fidelity_sweep() takes.
Fidelity assess_fidelity(std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// The metric that `deploy` would go by among those of all texts, [text].
std::string default_metric(std::span<const ReplayMetrics> replay_metrics);

// What `kvlab fidelity` leaves behind: a tidy table, a JSON object, and what policy files say of
// it.

inline constexpr int kFidelityFormat = 2;
inline constexpr const char* kFidelityCsv = "fidelity.csv";
inline constexpr const char* kFidelityJson = "fidelity.json";

/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value: one metric a row;
/// `kl` is the truth.
std::string fidelity_csv(std::span<const CacheConfig> configs, std::span<const FidelityText> texts,
                         std::uint32_t head_size);

/// Adds `texts`, `tokens` and `prompt_tokens` by text, `metrics`, `default_metric` and `ceiling` to
/// what is there.
void add_fidelity(nlohmann::ordered_json& json, const Fidelity& fidelity,
                  std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// How good a metric was when it was measured, from a fidelity.json: at the budget that is nearest
/// in tokens. Throws std::runtime_error that names the file: broken, of other weights, without this
/// metric, of shares of texts that differ in length.
nlohmann::json fidelity_evidence(const std::filesystem::path& file, const std::string& metric,
                                 std::uint32_t budget_tokens, const std::string& weights_xxh3);

/// One sentence of that evidence.
std::string evidence_text(const nlohmann::json& evidence);

}  // namespace kvlab
