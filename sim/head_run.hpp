// One configuration on one KV head: make room, admit, attend, observe, query by query.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/tally.hpp"
#include "sim/coded_rows.hpp"
#include "sim/head_view.hpp"
#include "sim/row_measure.hpp"
#include "sim/shared_rows.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {
// Keys of a live set that is numbered 0, 1, 2, … by age at every step (positions = cache).
//
// Only differences of positions count, so two frames serve. A token that has lost no younger one is
// as far from the query as it ever was: key and query stay at their true positions, where logits
// are those of any other cache. An older one is rotated to its number, and the query to its own.
// Such a key is rotated again only when a token older than it leaves, from its unrotated self,
// never in place.

class SqueezedKeys {
 public:
  SqueezedKeys(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// After an admission: places every live token.
  void place(const LiveSet& live);
  /// Computes the logits of all query heads of `query` for the first `visible` live tokens by age.
  void compute(std::uint32_t query, const LiveSet& live, std::uint32_t visible);
  /// The logits of one query head, [visible], in age order.
  std::span<const float> logits(std::uint32_t head) const;

 private:
  void multiply_at(std::uint32_t query, std::uint32_t place, std::vector<float>& by_slot);

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  Panels keys_;                        // [slot, dim], rotated to placed_[slot]
  std::vector<std::uint32_t> placed_;  // [slot]
  std::vector<std::uint32_t> tokens_;  // [slot]: which token it was placed for
  std::uint32_t old_ = 0;              // tokens that are placed by number
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
  /// `admissions`, `view`'s data and `rope` must outlive the run.
  HeadRun(LiveSet live, Positions positions, const std::vector<Admission>& admissions,
          const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Holds what the live set's hooks look at.
  void keep(std::shared_ptr<const void> owned) { kept_alive_ = std::move(owned); }
  void measure(const QuerySpan* span) {
    measure_ = RowMeasure(span, 1, view_, 1);
    if (coded_) measure_.separate_codes();
  }
  void write_outputs(OutputTarget target) { target_ = target; }
  /// Reads anew what the view's tokens bring: those that are still to come have changed.
  void look_again() { columns_ = TokenColumns(live_.columns(), view_, admissions_); }
  /// Called after each query with the live positions it attended, ascending.
  void watch(std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher) {
    watcher_ = std::move(watcher);
  }

  /// Called before each admission, before room is made, with the position to be admitted next.
  void watch_admissions(std::function<void(std::uint32_t, const LiveSet&)> watcher) {
    admission_watcher_ = std::move(watcher);
  }

  /// Whether attend(query) will look at the shared row of `query`.
  bool wants_row(std::uint32_t query) const;
  /// Takes the queries in order, each once.
  void attend(std::uint32_t query, SharedRows& rows);

  const LiveSet& live() const { return live_; }
  /// For share_ranks().
  AgedSet& aged() { return live_; }
  HeadOutcome outcome() {
    return {measure_.take().front(), live_.evictions(), live_.live_max(), live_.size()};
  }

 private:
  const Admission& admission() const { return admissions_[next_]; }
  /// Younger queries of the admission.
  std::uint32_t age_of(std::uint32_t query) const {
    return admission().first + admission().tokens - 1 - query;
  }
  bool observes(std::uint32_t query) const;
  void begin_admission();
  void finish_admission();
  void attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void divide_scores(const float* scores, std::uint32_t head);
  void take_probabilities(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void measure_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  void measure_changes(std::uint32_t query, std::uint32_t head, std::span<const float> full,
                       std::span<const float> own, SharedRows& rows);
  void measure_coding(std::uint32_t query, std::uint32_t head, SharedRows& rows);
  std::span<const float> output();

  LiveSet live_;
  const std::vector<Admission>& admissions_;
  std::size_t next_ = 0;
  HeadView view_;
  HeadArithmetic arithmetic_;
  TokenColumns columns_;
  std::optional<SqueezedKeys> squeezed_;
  std::unique_ptr<KeptRows> coded_;  // null where no token ever is
  std::shared_ptr<const void> kept_alive_;
  RowMeasure measure_;
  OutputTarget target_;
  std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher_;

  std::function<void(std::uint32_t, const LiveSet&)> admission_watcher_;

  std::uint32_t visible_ = 0;          // live tokens the current query may see
  bool sees_all_ = false;              // … which are all there ever were
  bool exact_ = true;                  // … and none of them is coded
  std::vector<float> kept_, p_, out_;  // by age: shared exponentials, probabilities; [dim]
  Tally seen_;                         // from the admission in progress
};

// One KV head, or all of a layer, through several runs, block of queries by block of queries.

/// Queries begin … end - 1.
struct QueryRange {
  std::uint32_t begin, end;
};

/// Takes queries, in order, through every run. Shared rows are computed only where somebody wants
/// them.
void run_head(QueryRange queries, SharedRows& rows, std::span<const std::unique_ptr<HeadRun>> runs);

/// One run of each KV head of a layer.
using LayerRun = std::vector<std::unique_ptr<HeadRun>>;

/// Takes the KV heads of a layer through every run query by query, so that caches may evict
/// together: for scope=layer. `rows`: by KV head.
void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs);

}  // namespace kvlab
