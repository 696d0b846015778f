// Replay: one captured sequence through many policies x budgets, by the formulas of
// docs/reference/metrics.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kOracleAttention = "oracle_attention";
inline constexpr std::string_view kOracleTopk = "oracle_topk";
inline constexpr std::string_view kOracleResidual =
    "oracle_residual";  ///< slow: only where requested
inline constexpr std::string_view kPassageRecall =
    "passage_recall:";  ///< and a passage's name: a metric
/// The oracles of the replay, as parse_policy wants them.
std::span<const std::string_view> replay_oracles();
bool is_oracle(std::string_view policy);

/// How many tokens the budget holds on this trace; kNoBudget: all. Throws BudgetTooSmall where the
/// configuration does not fit, and as resolve() does.
std::uint32_t tokens_within(const CacheConfig& config, const TraceReader& trace);

class HeadReplayer;        // sim/head_replayer.hpp
struct OutputProjections;  // policies/features/output_projections.hpp

struct ReplayOptions {
  Queries queries = Queries::decode;
  bool every_output_error = false;  ///< false: every eighth measured query
  bool plain = false;  ///< one configuration at a time, without configuration batches: what tests
                       ///< compare with
  HeadReplayer* elsewhere = nullptr;  ///< takes what it can off the CPU; null: nothing
  /// Of the traces' model, for features that are computed from them; null: a trace brings those.
  std::shared_ptr<const OutputProjections> output = nullptr;
  unsigned threads = 1;
  std::vector<std::uint32_t> layers;     ///< by number; empty: all without a window
  std::function<void(double)> progress;  ///< called with the fraction done; may be empty
};

/// One metric. `layer` and `head` are -1 for the aggregates.
struct Measurement {
  std::size_t config;  ///< index
  std::int32_t layer, head;
  std::string metric;
  double value;
  double standard_error;            ///< NaN where there is none
  std::uint64_t count;              ///< queries x query heads
  std::vector<double> blocks = {};  ///< Estimate::blocks, of the whole model; else empty
};

/// What one head kept over time: for pictures.
struct KeptSet {
  std::uint32_t query;                   ///< position
  std::vector<std::uint32_t> positions;  ///< live while it attended, ascending
};

struct ReplayResult {
  std::vector<std::uint32_t> budget_tokens;  ///< by configuration
  std::vector<Measurement> measurements;     ///< ordered: configuration, layer, head, metric
};

struct HeadOutcome;   // sim/metrics.hpp
struct LayerOutcome;  // sim/run/tabulate.hpp
class JointChanges;   // likewise

/// Which KV head a head task is about; `layer` counts those without a window.
struct HeadTask {
  std::uint32_t layer, kv_head;
};

/// The layers without a window of one trace (index `sequence` of the run) through `configs`, by
/// head task: one KV head of one layer, all configurations together.
class ReplayJob {
 public:
  /// `trace`, `configs` and `options` must outlive the job. Throws std::invalid_argument: no
  /// queries to measure, protected tokens that do not fit, a reference requested with cache
  /// positions, a layer that is not there, request thresholds that differ, …
  ReplayJob(const TraceReader& trace, std::uint32_t sequence, std::span<const CacheConfig> configs,
            const ReplayOptions& options);
  ReplayJob(ReplayJob&&) noexcept;
  ~ReplayJob();

  /// How many head tasks there are: by layer, then KV head.
  std::size_t tasks() const;
  HeadTask task(std::size_t index) const;
  /// The outcomes of one head task, by configuration. From any thread, in any order.
  std::vector<HeadOutcome> run(std::size_t index) const;
  /// The outcomes of several head tasks, in their order. `options.elsewhere` takes them together;
  /// what it leaves is done on `options.threads` threads.
  std::vector<std::vector<HeadOutcome>> run_together(std::span<const std::size_t> indices) const;

 private:
  friend class ReplayGathering;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Collects the head tasks of a job, each once, in any order, and makes rows of them. What a
/// complete layer no longer needs is dropped at once.
class ReplayGathering {
 public:
  explicit ReplayGathering(const ReplayJob& job);  ///< `job` must outlive this
  ~ReplayGathering();

  /// Throws std::runtime_error if the outcomes are not of the job's shape.
  void put(std::size_t index, std::vector<HeadOutcome> outcomes);
  /// When every head task is there. Does not depend on the order in which they came.
  ReplayResult result() const;

 private:
  const ReplayJob::Impl& job_;
  std::vector<LayerOutcome> layers_;
  std::vector<std::size_t> left_;  // head tasks to come, by layer
  std::size_t joined_ = 0;         // layers whose changes are in joint_
  std::unique_ptr<JointChanges> joint_;
};

/// Runs every head task of the job, in memory. Results do not depend on the number of threads.
/// Throws as ReplayJob does.
ReplayResult replay(const TraceReader& trace, std::uint32_t sequence,
                    std::span<const CacheConfig> configs, const ReplayOptions& options);

/// The kept set of one configuration and head at each query. `layer`: its number; `queries`: which
/// (ascending positions).
std::vector<KeptSet> kept_sets(const TraceReader& trace, std::uint32_t sequence,
                               const CacheConfig& config, const ReplayOptions& options,
                               std::uint32_t layer, std::uint32_t kv_head,
                               std::span<const std::uint32_t> queries);

}  // namespace kvlab
