// `kvlab fidelity`: measures whether a metric of the offline replay orders policies as the
// end-to-end evaluation does.
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

/// A text for the offline replay and the end-to-end evaluation. If the text was captured before,
/// `trace` is this trace and `ids` are the ids in it.
struct EvalText {
  std::string name;
  std::vector<std::int32_t> ids;
  std::uint32_t prompt_tokens = 0;
  std::optional<TraceReader> trace;
};

/// Reads a trace as a text. Throws std::runtime_error unless the trace verifies, was captured from
/// these weights, and has one prompt and then at least two decoded tokens.
EvalText text_of_trace(const std::filesystem::path& directory, const std::string& weights_xxh3,
                       unsigned threads);

/// The texts without those that other texts contain, and a warning for each pair of texts that
/// overlap; see overlaps_of().
struct DistinctTexts {
  std::vector<EvalText> texts;
  std::vector<std::string> warnings;
};
DistinctTexts distinct_texts(std::vector<EvalText> texts);

struct OfflineReplayOptions {
  const OutputSketch& sketch;     ///< sketch of the model's output projections, for captures
  std::filesystem::path capture;  ///< if the text has no trace: new folder for its trace
  bool every_output_error = false;
  unsigned threads = 1;
  HeadReplayer* device = nullptr;
  std::function<void(double)> capturing = {};  ///< gets the fraction captured, 0 to 1; may be empty
  std::function<void(double)> progress = {};   ///< gets the fraction replayed, 0 to 1; may be empty
};

/// The values of every metric of the replay that can rank policies, and of kv_bytes_mean and
/// kv_bytes_peak, [metric][configuration]. NaN if a configuration has no value.
using ReplayMetrics = std::map<std::string, std::vector<double>>;
ReplayMetrics run_offline_replay(Backend& backend, const EvalText& text,
                                 std::span<const CacheConfig> configs,
                                 const OfflineReplayOptions& options);

/// The end-to-end scores of the full cache and of each configuration, in this order.
std::vector<TokenScores> end_to_end_scores(const SweepRunner& run_sweep, const EvalText& text,
                                           std::span<const CacheConfig> configs, unsigned threads,
                                           std::function<void(double)> progress);

/// KL to the full cache, [configuration][scored token], without the first configuration.
std::vector<std::vector<double>> kl_of(std::vector<TokenScores> scores);
/// Seconds that the end-to-end evaluation takes for a token of one configuration. They are measured
/// by a run of the full cache over the beginning of a text, and used to estimate the progress until
/// more is known.
double end_to_end_rate(const SweepRunner& run_sweep, const EvalText& text, unsigned threads);

/// The results of one text.
struct FidelityText {
  std::string name;
  std::uint32_t tokens = 0, prompt_tokens = 0;
  std::vector<std::vector<double>> kl_tokens;  ///< [configuration][token]: KL to the full cache in
                                               ///< the end-to-end evaluation, in nats
  std::vector<double> kl;                      ///< [configuration]: mean of kl_tokens
  ReplayMetrics replay_metrics;                ///< metrics of the offline replay
};
FidelityText fidelity_text(const EvalText& text, std::vector<std::vector<double>> kl_tokens,
                           ReplayMetrics replay_metrics);

/// Two policies that a metric orders wrongly.
struct Misordered {
  std::size_t preferred, better;  ///< the configuration that the metric prefers, and the one with
                                  ///< lower KL
  double ratio;                   ///< KL of `preferred` over KL of `better`
};

/// How well one metric predicts KL among the configurations of one budget.
struct FidelityBudget {
  std::string budget;
  double rho;             ///< Spearman's rho of the means over texts
  Interval rho_interval;  ///< 95% interval by resampling texts; NaN for one text
  double rho_single;      ///< mean of the rhos of single texts
  double regret;  ///< KL of the metric's first choice divided by the lowest KL, both as means over
                  ///< texts
  double worst_regret;                  ///< the largest regret of a single text
  std::size_t chosen, best;             ///< the best configuration by the metric, and by KL
  std::size_t significantly_different;  ///< number of pairs that differ significantly in KL,
                                        ///< according to a paired block bootstrap
  std::vector<Misordered>
      misordered;  ///< significantly different pairs that the metric orders wrongly, worst first
};

struct FidelityMetric {
  std::string metric;
  std::vector<FidelityBudget> within;  ///< [budget], in the order of the sweep
  double pooled;                       ///< Spearman's rho over all budgets, of the means over texts
};

struct Fidelity {
  std::vector<FidelityMetric> metrics;  ///< metrics that every text has
  std::string standard;                 ///< the metric that `deploy` uses
  /// [budget]: rank correlation of KL on one text with KL on another text, as the mean over all
  /// pairs of texts; NaN for one text. A metric that is computed from one text cannot be expected
  /// to do better.
  std::vector<double> ceiling;

  const FidelityMetric* find(const std::string& metric) const;
};

/// Throws std::invalid_argument if a budget has fewer than three configurations, or if a
/// configuration never evicts.
void check_fidelity_sweep(std::span<const CacheConfig> configs);
/// Assesses every metric. check_fidelity_sweep() must accept the sweep.
Fidelity assess_fidelity(std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// The metric that `deploy` would use among the metrics that all texts have. `replay_metrics`
/// [text].
std::string default_metric(std::span<const ReplayMetrics> replay_metrics);

// The results of `kvlab fidelity` as a tidy table, as a JSON object, and as evidence for policy
// files.

inline constexpr int kFidelityFormat = 2;
inline constexpr const char* kFidelityCsv = "fidelity.csv";
inline constexpr const char* kFidelityJson = "fidelity.json";

/// CSV with one metric in a row:
/// text,policy,params,budget,budget_tokens,prefill,positions,seed,metric,value. The metric `kl` is
/// the one that the other metrics should predict.
std::string fidelity_csv(std::span<const CacheConfig> configs, std::span<const FidelityText> texts,
                         std::uint32_t head_size);

/// Adds `texts`, `tokens` and `prompt_tokens` by text, `metrics`, `default_metric` and `ceiling` to
/// `json`.
void add_fidelity(nlohmann::ordered_json& json, const Fidelity& fidelity,
                  std::span<const CacheConfig> configs, std::span<const FidelityText> texts);

/// Reads from a fidelity.json how well a metric predicted KL, at the budget that is nearest in
/// tokens. Throws std::runtime_error that names the file if the file is broken or was measured on
/// other weights, if it lacks this metric, or if its budgets are shares of texts that differ in
/// length.
nlohmann::json fidelity_evidence(const std::filesystem::path& file, const std::string& metric,
                                 std::uint32_t budget_tokens, const std::string& weights_xxh3);

/// That evidence as one sentence.
std::string evidence_text(const nlohmann::json& evidence);

}  // namespace kvlab
