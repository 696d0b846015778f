// One configuration on one KV head: takes a cache through the appends of a sequence and measures
// the metrics.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "sim/cache/host_cache.hpp"
#include "sim/head_measure.hpp"
#include "sim/head_view.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

/// Queries `begin` to `end` - 1.
struct QueryRange {
  std::uint32_t begin, end;
};

class PlainRun {
 public:
  /// `appends`, the data of `view`, and `rope` must outlive the run.
  PlainRun(LiveSet live, Positions positions, const std::vector<Append>& appends,
           const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Takes ownership of data that the hooks of the live set read, so that it lives as long as the
  /// run.
  void keep(std::shared_ptr<const void> owned) { kept_alive_ = std::move(owned); }
  void measure(const MeasuredQueries* measured) {
    measure_ = HeadMeasure(measured, view_);
    if (live().is_quantized()) measure_.separate_quantization();
  }
  /// Sets a function that is called after each query with the live positions to which it attended,
  /// ascending.
  void watch(std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher) {
    watcher_ = std::move(watcher);
  }
  /// Sets a function that is called before each append, and before the evictions for it, with the
  /// position that is appended next.
  void watch_appends(std::function<void(std::uint32_t, const LiveSet&)> watcher) {
    append_watcher_ = std::move(watcher);
  }

  /// Whether attend() will read the shared row of `query`.
  bool wants_row(std::uint32_t query) const;
  /// The position at which the append in progress ends (exclusive).
  std::uint32_t append_end() const { return current_append().first + current_append().tokens; }
  /// Runs some queries of one append. All queries must be run in order, each once.
  void attend(QueryRange queries, SharedRows& rows);

  const LiveSet& live() const { return cache_.live(); }
  /// The live tokens as an AgedSet, which share_ranks() needs.
  AgedSet& aged_set() { return cache_.aged_set(); }
  HeadOutcome outcome() {
    return {measure_.take().front(), live().evictions(), live().live_max(), live().size()};
  }

 private:
  const Append& current_append() const { return appends_[next_]; }
  /// Number of queries of the append that come after `query`.
  std::uint32_t age_of(std::uint32_t query) const { return append_end() - 1 - query; }
  /// Whether the policy observes the query, or metrics are measured at it.
  bool wants(std::uint32_t query) const;
  HeadAppend head_append() const;
  void measure_head(std::uint32_t query, std::uint32_t head, std::span<const float> p,
                    SharedRows& rows);
  void measure_quantization(std::uint32_t query, std::uint32_t head,
                            std::span<const std::uint32_t> live, std::span<const float> out,
                            SharedRows& rows);

  const std::vector<Append>& appends_;
  std::size_t next_ = 0;
  HeadView view_;
  const RopeTable& rope_;
  // Whether the cache takes its probabilities from the shared rows and masks the tokens that are
  // not live.
  bool masks_rows_;
  HostCache cache_;
  std::shared_ptr<const void> kept_alive_;
  HeadMeasure measure_;
  std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher_;
  std::function<void(std::uint32_t, const LiveSet&)> append_watcher_;
  std::vector<float> exact_p_, exact_out_;  // exact_p_: probabilities by age; exact_out_: [dim]
};

/// The runs of one configuration on some KV heads of a layer.
using LayerRun = std::vector<std::unique_ptr<PlainRun>>;

/// Takes all KV heads of a layer through every run, one append after another, so that the caches of
/// a layer can evict together. Computes shared rows only if wants_row() is true for one of the
/// runs. `rows` has one element for each KV head.
void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs);

}  // namespace kvlab
