// One configuration of the feedback lane.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "policies/rungs/ladder.hpp"
#include "sim/lanes/feedback/aged_cache.hpp"
#include "sim/lanes/group_rows.hpp"
#include "sim/lanes/lane.hpp"
#include "sim/lanes/output_chain.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

// Rows of attention over tokens as the rungs of ladders keep them.
/// A KV head's tokens, each as one rung keeps it: a code is a pure function of a token and the
/// forms that it comes down through, so all configurations share it.
struct RungRow {
  GroupRows rows;             ///< of coded keys
  std::vector<float> values;  ///< [token, dim], behind the butterflies
};

class RungRows {
 public:
  /// `view`'s data and `rope` must outlive this. Throws std::invalid_argument where heads are no
  /// whole blocks of channels.
  RungRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// By rung of a ladder; null: its tokens are exact.
  std::vector<RungRow*> of(std::span<const RungSlots> ladder);
  /// The rows of queries [first, first + count), of all rungs that were asked for.
  void compute(std::uint32_t first, std::uint32_t count);

 private:
  std::unique_ptr<RungRow> code(const std::vector<const KvForm*>& way) const;

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  std::map<std::vector<const KvForm*>, std::unique_ptr<RungRow>> rows_;  // by the way down
};

/// Memory that the configurations of a lane use one after another.
struct GatherRoom {
  AlignedVector<float> kept;                    // [quad][age][4]
  AlignedVector<std::uint64_t> mass;            // [age]
  std::vector<std::uint32_t> asked;             // [age]
  std::vector<float> sum, most, least, shared;  // [heads]
  std::vector<bool> lost;                       // [heads]: taken from its own maximum
  std::vector<float> row;                       // one head's, by age
  AlignedVector<float> products, rotated;       // [4][age], [4][dim]: squeezed
  std::vector<std::uint32_t> ages;              // 0, 1, 2, …
  std::vector<std::uint8_t> source;             // [age]: which of the sources has it
  std::vector<std::uint32_t> picked;            // positions of some of them
  AlignedVector<float> weights;                 // [picked][4]
  /// By rung, then of staged tokens, which are exact: a row, and what brings it to the common
  /// shift.
  std::vector<std::pair<const float*, std::array<float, kQuad>>> sources;
  std::vector<float> outputs;  // [heads][dim]: sums of values times exponentials
  std::vector<float> factors;  // [group]: what makes outputs of them
  OutputChain chain;

  void resize(std::size_t tokens, std::uint32_t heads);
};

class FeedbackRun {
 public:
  /// `coded`: of all rungs' rows; null where no configuration of the lane has a ladder.
  FeedbackRun(const ResolvedConfig& config, LiveSet::Identity identity, const HeadView& view,
              const QuerySpan* span, RungRows* coded);

  /// `rows`: the full cache's. `unrounded`: the same at unrounded positions, and `places`, for
  /// squeezed positions; else null.
  void attend(std::uint32_t query, GroupRows& rows, GroupRows* unrounded, const PlaceTable* places,
              GatherRoom& room);

  const AgedCache& cache() const { return cache_; }
  AgedSet& aged() { return cache_; }
  /// After the last query.
  HeadOutcome outcome() {
    return {measure_.take().front(), cache_.evictions(), cache_.live_max(), cache_.size()};
  }
  /// The live tokens that the last query could see.
  std::span<const std::uint32_t> visible() const { return cache_.positions().first(visible_); }

  /// The first token whose exponentials at squeezed positions are shared: those before it are the
  /// run's own, or not live.
  std::uint32_t first_shared() const {
    return old_keys_.size() < cache_.size() ? cache_.positions()[old_keys_.size()] : 0;
  }

 private:
  bool observes(std::uint32_t query) const;
  void make_room(std::uint32_t now);
  void see_all(std::uint32_t query, GroupRows& rows);
  bool find_codes(GatherRoom& room) const;
  /// Whose row has a token of that source; null: the exact one.
  const RungRow* row_of(std::uint8_t source) const {
    return source < rungs_.size() ? rungs_[source] : nullptr;
  }
  void see_coded(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void take_codes(std::uint32_t query, std::uint32_t quad, const GroupRows& rows,
                  GatherRoom& room) const;
  void take_own_coded(std::uint32_t query, std::uint32_t head, const GroupRows& rows,
                      GatherRoom& room) const;
  void measure_coding(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void take_coded_outputs(const GroupRows& rows, GatherRoom& room) const;
  void add_values_of(const RungRow* from, GatherRoom& room, float* out) const;
  void observe_all(std::uint32_t query, GroupRows& rows);
  void see_squeezed(std::uint32_t query, GroupRows& rows, GroupRows& unrounded,
                    const PlaceTable& places, GatherRoom& room);
  void take_squeezed(std::uint32_t query, GroupRows& unrounded, const PlaceTable& places,
                     GatherRoom& room);
  /// Whether a group gives what its largest head gives, not the sum.
  bool by_largest() const { return cache_.modifiers().group == Modifiers::Group::max; }
  bool has_whole_row(std::uint32_t query) const;
  void take_whole(std::uint32_t query, const GroupRows& unrounded, GatherRoom& room) const;
  void rotate_queries(std::uint32_t query, std::uint32_t quad, const PlaceTable& places,
                      GatherRoom& room, const float** queries) const;
  void take_own_squeezed(std::uint32_t query, std::uint32_t head, const GroupRows& unrounded,
                         GatherRoom& room);
  void add_shared(std::uint32_t query, GroupRows& rows, GatherRoom& room) const;
  void observe_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void see_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void take_kept(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void take_kept_outputs(std::uint32_t query, const GroupRows& rows, GatherRoom& room) const;
  void gather_kept(std::uint32_t query, const GroupRows& rows, GatherRoom& room) const;
  void take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows, GatherRoom& room);
  void take_own_row(std::uint32_t head, GatherRoom& room) const;
  void take_masses(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void take_requests(std::uint32_t query, GroupRows& rows, GatherRoom& room);
  void add_masses(const std::uint64_t* mass);
  void add_requests(std::uint32_t query, const std::uint32_t* asked);
  void measure(std::uint32_t query, GroupRows& rows, const float* shared);
  void take_squeezed_outputs(std::uint32_t query, GroupRows& unrounded, GatherRoom& room) const;
  void take_own_outputs(GatherRoom& room) const;
  /// Whether a measured query's outputs are looked at.
  bool takes_outputs(std::uint32_t query, const GroupRows& rows) const {
    return rows.draws() > 0 || measure_.samples(query);
  }
  void measure_outputs(std::uint32_t query, GroupRows& rows, GatherRoom* room);
  void begin_observing();
  float weight_of(std::uint32_t query) const { return cache_.weight(cursor_.age_of(query)); }

  AgedCache cache_;
  std::vector<RungRow*> rungs_;  // by rung; null where it is exact, empty where all are
  TokenColumns columns_;
  bool squeezed_;
  AgedKeys old_keys_;  // of live tokens that have lost a younger one; the others follow one another
  AdmissionCursor cursor_;
  const HeadView& view_;
  RowMeasure measure_;
  std::uint32_t visible_ = 0;
  Seen seen_;                        // of the admission in progress
  std::vector<std::uint64_t> mass_;  // [age], over an admission of several queries
  std::vector<std::uint32_t> requests_, last_request_;
};

}  // namespace kvlab
