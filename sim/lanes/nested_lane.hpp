// The lane of nested orders: where a rank depends neither on the budget nor on what was evicted,
// the live set of a budget lies within that of every larger one. So one stack serves all budgets: a
// token is kept at the level of the smallest budget that still has it, a victim of one level drops
// to the next, and running sums over levels give every budget's figures at once (Mattson et al.
// 1970).
#pragma once

#include "sim/lanes/lane.hpp"
#include "sim/lanes/policy_loops.hpp"

namespace kvlab {

/// Ranks of tokens by position, for `now`.
class NestedOrder {
 public:
  virtual ~NestedOrder() = default;
  virtual void rank(std::span<const std::uint32_t> positions, std::uint32_t now,
                    std::span<std::uint64_t> ranks) const = 0;
  /// The tokens [first, first + count) enter.
  virtual void admit(std::uint32_t first, std::uint32_t count) = 0;
  /// Every cache of the lane has attended `query`.
  virtual void spend(std::uint32_t query, GroupRows& rows) = 0;
  virtual bool wants_rows() const = 0;
};

class NestedLane final : public Lane {
 public:
  /// `configs`: one order, one prefill and the same guards, by rising budget. `span` may be null:
  /// nothing is measured.
  NestedLane(std::vector<LaneConfig> configs, std::unique_ptr<NestedOrder> order,
             const HeadView& view, const QuerySpan* span);

  bool wants_row(std::uint32_t query) const override;
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<LaneOutcome> outcomes() override;
  void watch(LaneWatcher watcher) override { watcher_ = std::move(watcher); }

 private:
  struct Level {
    std::uint32_t budget;
    std::vector<std::uint32_t> tokens;  ///< live here, and at no smaller budget
    HeadStats stats;
    std::uint64_t evictions = 0, live_max = 0;
  };
  void begin_admission(const Admission& admission);
  void make_room(std::uint32_t now);
  void drop(std::vector<std::uint32_t>& pool, std::size_t leaving, std::uint32_t now);
  void attend_query(std::uint32_t query, GroupRows& rows);
  std::span<const std::uint32_t> visible(std::size_t level) const;
  void measure(std::uint32_t query, GroupRows& rows);
  void measure_outputs(std::uint32_t query, GroupRows& rows);
  void add_to_outputs(std::uint32_t query, std::span<const std::uint32_t> tokens,
                      const GroupRows& rows);
  void measure_level(std::uint32_t query, std::size_t level, GroupRows& rows);
  std::vector<float> own_output(std::uint32_t query, std::size_t level, std::uint32_t head,
                                const GroupRows& rows) const;
  std::vector<std::uint32_t> live(std::size_t level) const;
  void show(std::uint32_t query);

  std::unique_ptr<NestedOrder> order_;
  Guards guards_;
  HeadView view_;
  const QuerySpan* span_;
  AdmissionCursor cursor_;
  std::vector<Level> levels_;
  std::uint32_t unseen_ = 0;  ///< of the admission's tokens, by the current query
  std::vector<std::uint32_t> carried_;
  std::vector<std::uint64_t> ranks_;
  std::vector<float> sums_;     // [level][heads]: running, of the current query
  std::vector<float> outputs_;  // [heads][dim]: running sums of a sampled query
  std::vector<float> weights_;
  LaneWatcher watcher_;
};

/// The order of a registered policy.
std::unique_ptr<NestedOrder> nested_order(const LaneConfig& config, LiveSet::Identity identity,
                                          std::uint32_t tokens);
/// `oracle_mass`: least future mass of the full cache first. `masses` [token]: all that it gives.
std::unique_ptr<NestedOrder> future_order(std::vector<std::uint64_t> masses);

}  // namespace kvlab
