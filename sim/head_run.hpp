// One configuration on one KV head: evict to the budget, append, attend, observe, query by query.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/tally.hpp"
#include "sim/head_view.hpp"
#include "sim/quantized_rows.hpp"
#include "sim/row_measure.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {
// Keys of a live set that is numbered 0, 1, 2, … by age at every step (positions = cache).
//
// Only differences of positions matter. A token that is younger than every evicted token is as far
// from the query as it ever was. Its key and the query stay at their original positions, where
// logits equal those of any other cache. For an older token, the key is rotated to its number, and
// the query to its own number. Such a key is rotated again only when a token older than it is
// evicted, from the unrotated key, never in place.

class CachePositionKeys {
 public:
  CachePositionKeys(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Call after an append: rotates the keys of live tokens to their positions.
  void update(const LiveSet& live);
  /// Computes the logits of all query heads of `query` for the first `visible` live tokens by age.
  void compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible);
  /// The logits of one query head, [visible], in age order.
  std::span<const float> logits(std::uint32_t head) const;

 private:
  void multiply_at(std::uint32_t query, std::uint32_t position_in_cache,
                   std::vector<float>& by_slot);

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  Panels keys_;                            // [slot, dim], rotated to rotated_to_[slot]
  std::vector<std::uint32_t> rotated_to_;  // [slot]
  std::vector<std::uint32_t> tokens_;      // [slot]: the token whose key was rotated
  std::uint32_t old_ = 0;  // oldest live tokens, whose keys are rotated to their numbers
  std::vector<float> queries_, by_number_, by_position_, by_age_;
  std::size_t visible_ = 0;
};

/// Where a run's attention outputs go: [token, group, dim] by strides in floats. Null: nowhere.
struct OutputTarget {
  float* out = nullptr;
  std::size_t token_stride = 0, head_stride = 0;
};

class HeadRun {
 public:
  /// `appends`, `view`'s data and `rope` must outlive the run.
  HeadRun(LiveSet live, Positions positions, const std::vector<Append>& appends,
          const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Keeps the data alive that the live set's hooks read.
  void keep(std::shared_ptr<const void> owned) { kept_alive_ = std::move(owned); }
  void measure(const MeasuredQueries* measured) {
    measure_ = RowMeasure(measured, 1, view_, 1);
    if (quantized_) measure_.separate_quantization();
  }
  void write_outputs(OutputTarget target) { target_ = target; }
  /// Reads the view's token features again, because those of later tokens have changed.
  void look_again() { features_ = TokenFeatures(live_.features(), view_, appends_); }
  /// Called after each query with the live positions it attended, ascending.
  void watch(std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher) {
    watcher_ = std::move(watcher);
  }

  /// Called before each append, before tokens are evicted, with the position to be appended next.
  void watch_appends(std::function<void(std::uint32_t, const LiveSet&)> watcher) {
    append_watcher_ = std::move(watcher);
  }

  /// Whether attend(query) will look at the shared row of `query`.
  bool wants_row(std::uint32_t query) const;
  /// Takes the queries in order, each once.
  void attend(std::uint32_t query, SharedRows& rows);

  const LiveSet& live() const { return live_; }
  /// For share_ranks().
  AgedSet& aged_set() { return live_; }
  HeadOutcome outcome() {
    return {measure_.take().front(), live_.evictions(), live_.live_max(), live_.size()};
  }

 private:
  const Append& current_append() const { return appends_[next_]; }
  /// Younger queries of the append.
  std::uint32_t age_of(std::uint32_t query) const {
    return current_append().first + current_append().tokens - 1 - query;
  }
  bool observes(std::uint32_t query) const;
  void begin_append();
  void finish_append();
  void attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void divide_scores(const float* scores, std::uint32_t head);
  void take_probabilities(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void measure_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void measure_changes(std::uint32_t query, std::uint32_t head, std::span<const float> full,
                       std::span<const float> own, SharedRows& rows);
  void measure_quantization(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  std::span<const float> output();

  LiveSet live_;
  const std::vector<Append>& appends_;
  std::size_t next_ = 0;
  HeadView view_;
  HeadArithmetic arithmetic_;
  TokenFeatures features_;
  std::optional<CachePositionKeys> cache_positions_;
  std::unique_ptr<KeptRows> quantized_;  // null if no token is ever quantized
  std::shared_ptr<const void> kept_alive_;
  RowMeasure measure_;
  OutputTarget target_;
  std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher_;

  std::function<void(std::uint32_t, const LiveSet&)> append_watcher_;

  std::uint32_t visible_ = 0;          // live tokens the current query may see
  bool sees_all_ = false;              // whether these are all tokens so far
  bool exact_ = true;                  // whether none of them is quantized
  std::vector<float> kept_, p_, out_;  // by age: shared exponentials, probabilities; [dim]
  Tally seen_;                         // from the append in progress
};

// One KV head, or all of a layer, through several runs, block of queries by block of queries.

/// Queries begin … end - 1.
struct QueryRange {
  std::uint32_t begin, end;
};

/// Takes queries, in order, through every run. Shared rows are computed only if a run wants them.
void run_head(QueryRange queries, SharedRows& rows, std::span<const std::unique_ptr<HeadRun>> runs);

/// One run of each KV head of a layer.
using LayerRun = std::vector<std::unique_ptr<HeadRun>>;

/// Takes the KV heads of a layer through every run query by query, so that caches may evict
/// together: for scope=layer. `rows`: by KV head.
void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs);

}  // namespace kvlab
