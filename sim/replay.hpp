// Replay: runs one captured sequence through many policies and budgets, and computes the metrics of
// docs/reference/metrics.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "sim/refetch/selector.hpp"
#include "traces/trace.hpp"

namespace kvlab {

inline constexpr std::string_view kOracleAttention = "oracle_attention";
inline constexpr std::string_view kOracleTopk = "oracle_topk";
/// An oracle that is slow, so it runs only if it is requested.
inline constexpr std::string_view kOracleResidual = "oracle_residual";
/// The oracle of a replay with refetch.
inline constexpr std::string_view kBelady = "belady";
/// Prefix of a metric's name; the name of a passage follows.
inline constexpr std::string_view kPassageRecall = "passage_recall:";
/// The names of the replay's oracles, in the form in which parse_policy() needs them.
std::span<const std::string_view> replay_oracles();
bool is_oracle(std::string_view policy);

/// The budget of `config` on this trace, in tokens; kNoBudget if it is `all`. Throws BudgetTooSmall
/// if the configuration does not fit the budget. Also throws as resolve() does.
std::uint32_t tokens_within(const CacheConfig& config, const TraceReader& trace);

/// The maximum number of tokens that a query of this trace selects.
std::uint32_t max_selected(const Selector& refetch, const TraceReader& trace);

/// Throws std::invalid_argument if the trace lacks what the replay reads. A replay with `--refetch
/// logged` reads the selections of all `queries`. Any other replay reads queries, keys and values.
/// `refetch` is null for a replay without refetch.
void check_selections(const std::optional<Selector>& refetch, Queries queries,
                      const TraceReader& trace);

/// Throws unless the configuration can be replayed on this trace. `refetch` is null for a replay
/// without refetch. Throws BudgetTooSmall if the selected tokens, the protected tokens and the
/// query's own token do not fit into the budget, and std::invalid_argument for any other reason.
void check_refetch(const std::optional<Selector>& refetch, const CacheConfig& config,
                   const TraceReader& trace);

class HeadReplayer;        // sim/head_replayer.hpp
struct OutputProjections;  // policies/features/output_projections.hpp

struct ReplayOptions {
  Queries queries = Queries::decode;
  /// Whether output errors are measured at every measured query; otherwise at every eighth.
  bool every_output_error = false;
  /// Runs one configuration at a time, without configuration batches. Tests use it to check the
  /// configuration batches.
  bool plain = false;
  /// With refetch: which tokens a query selects. Evicted tokens return when they are selected.
  std::optional<Selector> refetch = std::nullopt;
  /// A device that runs those configurations that it supports; null: none.
  HeadReplayer* elsewhere = nullptr;
  /// The model's output projections, from which some features are computed. If null, the trace must
  /// have these features.
  std::shared_ptr<const OutputProjections> output = nullptr;
  unsigned threads = 1;
  std::vector<std::uint32_t> layers;     ///< layer numbers; empty: all without a window
  std::function<void(double)> progress;  ///< called with the finished fraction; may be empty
};

/// One value of a metric. `layer` and `head` are -1 for aggregates.
struct Measurement {
  std::size_t config;  ///< index of the configuration
  std::int32_t layer, head;
  std::string metric;
  double value;
  double standard_error;  ///< NaN if unknown
  std::uint64_t count;    ///< number of values that it is computed from (docs/reference/metrics.md)
  /// Estimate::blocks for aggregates of the whole model; otherwise empty.
  std::vector<double> blocks = {};
};

/// The tokens that one head kept over time, for pictures.
struct KeptSet {
  std::uint32_t query;  ///< position
  /// Positions that were live when the query attended, ascending.
  std::vector<std::uint32_t> positions;
};

struct ReplayResult {
  std::vector<std::uint32_t> budget_tokens;  ///< by configuration
  std::vector<Measurement> measurements;     ///< ordered by configuration, layer, head, metric
  /// With refetch: lru_fetches(), summed over the KV heads. Empty if a prompt follows decoded
  /// tokens, because the order in which LRU has seen tokens used then depends on the budget.
  std::vector<std::uint64_t> lru_fetches = {};
};

struct HeadOutcome;   // sim/metrics.hpp
struct LayerOutcome;  // sim/run/tabulate.hpp
class JointChanges;   // sim/run/tabulate.hpp

/// The KV head of a head task. `layer` is its index among the layers without a window.
struct HeadTask {
  std::uint32_t layer, kv_head;
};

/// The replay of one trace: runs its layers without a window through `configs`. `sequence` is the
/// trace's index in the run. A head task is one KV head of one layer with all configurations.
class ReplayJob {
 public:
  /// `trace`, `configs` and `options` must outlive the job. Throws std::invalid_argument if, for
  /// example, there are no queries to measure, protected tokens do not fit, an oracle is requested
  /// with cache positions, a layer does not exist, or request thresholds differ.
  ReplayJob(const TraceReader& trace, std::uint32_t sequence, std::span<const CacheConfig> configs,
            const ReplayOptions& options);
  ReplayJob(ReplayJob&&) noexcept;
  ~ReplayJob();

  /// Number of head tasks. They are ordered by layer, then by KV head.
  std::size_t tasks() const;
  HeadTask task(std::size_t index) const;
  /// The outcomes of one head task, by configuration. May be called from any thread and in any
  /// order.
  std::vector<HeadOutcome> run(std::size_t index) const;
  /// The outcomes of several head tasks, in their order. `options.elsewhere` runs the
  /// configurations that it supports; the rest run on `options.threads` threads.
  std::vector<std::vector<HeadOutcome>> run_together(std::span<const std::size_t> indices) const;

 private:
  friend class ReplayGathering;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Collects the outcomes of all head tasks of a job and computes metrics from them. put() must be
/// called once for each head task, in any order. When a layer is complete, data that is no longer
/// needed is freed.
class ReplayGathering {
 public:
  explicit ReplayGathering(const ReplayJob& job);  ///< `job` must outlive this object
  ~ReplayGathering();

  /// Throws std::runtime_error if the outcomes do not have the job's shape.
  void put(std::size_t index, std::vector<HeadOutcome> outcomes);
  /// Call it when put() has been called for every head task. The result does not depend on the
  /// order of these calls.
  ReplayResult result() const;

 private:
  const ReplayJob::Impl& job_;
  std::vector<LayerOutcome> layers_;
  std::vector<std::size_t> left_;  // head tasks still missing, by layer
  std::size_t joined_ = 0;         // number of layers whose changes have been added to joint_
  std::unique_ptr<JointChanges> joint_;
  std::vector<std::uint64_t> lru_fetches_;  // the sum of lru_fetches() over the head tasks so far
};

/// Runs every head task of a ReplayJob in memory. Results do not depend on the number of threads.
/// Throws as ReplayJob does.
ReplayResult replay(const TraceReader& trace, std::uint32_t sequence,
                    std::span<const CacheConfig> configs, const ReplayOptions& options);

/// The tokens that one configuration keeps on one head at each of `queries` (ascending positions).
/// `layer` is a layer number.
std::vector<KeptSet> kept_sets(const TraceReader& trace, std::uint32_t sequence,
                               const CacheConfig& config, const ReplayOptions& options,
                               std::uint32_t layer, std::uint32_t kv_head,
                               std::span<const std::uint32_t> queries);

}  // namespace kvlab
