// The configuration batch of nested orders. If ranks depend neither on the budget nor on what was
// evicted, the live set of a budget is a subset of that of every larger budget, so one stack serves
// all budgets. A token is at the level of the smallest budget that still keeps it, a victim of one
// level drops to the next, and running sums over levels give every budget's metrics at once
// (Mattson et al. 1970).
//
// This is the only place beside policies/aged_set.hpp that holds the rule of eviction. What an
// AgedSet decides for one cache, the stack decides for all budgets at once. Tests compare it with
// the plain replay.
#pragma once

#include "sim/config_batches/config_batch.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

/// An eviction order that is the same for all budgets. rank() gives the ranks of tokens for step
/// `now`.
class NestedOrder {
 public:
  virtual ~NestedOrder() = default;
  virtual void rank(std::span<const std::uint32_t> positions, std::uint32_t now,
                    std::span<std::uint64_t> ranks) const = 0;
  /// Appends the tokens [first, first + count).
  virtual void append(std::uint32_t first, std::uint32_t count) = 0;
  /// Called when every cache of the configuration batch has attended `query`.
  virtual void spend(std::uint32_t query, GroupRows& rows) = 0;
  virtual bool wants_rows() const = 0;
  /// Whether ranks are positions. Then rank() need not be called.
  virtual bool oldest_first() const = 0;
};

class NestedConfigBatch final : public ConfigBatch {
 public:
  /// `configs`: one order, one prefill and the same protected tokens, by ascending budget.
  /// `measured` may be null: nothing is measured.
  NestedConfigBatch(BatchedConfigs configs, std::unique_ptr<NestedOrder> order,
                    const HeadView& view, const MeasuredQueries* measured);

  bool wants_row(std::uint32_t query) const override;
  void attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) override;
  std::vector<HeadOutcome> outcomes() override;
  void watch(ConfigBatchWatcher watcher) override { watcher_ = std::move(watcher); }

 private:
  struct Level {
    std::uint32_t budget;
    std::uint64_t evictions = 0, live_max = 0;
  };
  /// A victim on its way to the next level.
  struct EvictionCandidate {
    std::uint32_t position;
    std::uint64_t rank;
  };
  void begin_append(const Append& append);
  bool takes_one(const Append& append) const;
  void evict_one_from_each_level(std::uint32_t now);
  EvictionCandidate exchange(std::size_t level, std::uint32_t now, const EvictionCandidate* comes);
  std::size_t find_victim(std::size_t begin, std::size_t end, std::uint32_t now) const;
  void evict_to_budget(std::uint32_t now);
  void drop(std::vector<std::uint32_t>& pool, std::size_t num_evicted, std::uint32_t now,
            std::vector<std::uint32_t>& carried);
  void attend_query(std::uint32_t query, GroupRows& rows);
  std::size_t begin_of(std::size_t level) const { return begins_[level]; }
  std::size_t end_of(std::size_t level) const {
    return begins_[level + 1] - (level == 0 ? unseen_ : 0);
  }
  void measure(std::uint32_t query, GroupRows& rows);
  void measure_recalls(std::uint32_t query, std::size_t whole, GroupRows& rows);
  void add_level(std::uint32_t query, std::size_t level, const GroupRows& rows);
  void measure_outputs(std::uint32_t query, std::size_t level, std::size_t whole, GroupRows& rows);
  const float* level_outputs(std::uint32_t query, std::size_t level, const GroupRows& rows);
  std::vector<float> own_output(std::uint32_t query, std::size_t level, std::uint32_t head,
                                const GroupRows& rows) const;
  std::vector<std::uint32_t> live(std::size_t level) const;
  void show(std::uint32_t query);

  std::unique_ptr<NestedOrder> order_;
  bool oldest_first_;
  ProtectedTokens protected_tokens_;
  HeadView view_;
  AppendCursor cursor_;
  std::vector<Level> levels_;
  RowMeasure measure_;  // a set for each level
  std::vector<std::uint32_t>
      tokens_;  // live at a level's budget and at no smaller one; ascending in each level
  std::vector<std::size_t> begins_;   // [level + 1]: where the levels lie in tokens_
  std::uint32_t unseen_ = 0;          // tokens of the append that the current query does not see
  std::vector<std::uint64_t> ranks_;  // [tokens]
  std::vector<double> running_;       // [level][heads]: sums of the current query, running
  std::vector<std::uint32_t> hits_;   // [level][heads]: hits of the current query, running
  std::vector<double> inverse_;       // [group]: inverse of the row's sum
  std::vector<std::uint32_t> due_;    // [group]: hits of a level that has all tokens
  std::vector<double> distances_;     // [group]
  std::vector<float> factors_;        // [group]
  std::vector<float> weights_;        // [token of a level][4]
  AlignedVector<float> outputs_;      // [heads][dim]: sums of values, running over levels
  AlignedVector<float> own_outputs_;  // the same of one level, some heads from their own maximum
  ConfigBatchWatcher watcher_;
};

/// The order of a registered policy.
std::unique_ptr<NestedOrder> nested_order(const ResolvedConfig& config, LiveSet::Identity identity,
                                          const HeadView& view);
/// The order of `oracle_attention`: the token with the least future mass in the full cache is
/// evicted first. `masses` [token]: the mass that a token gets from all queries.
std::unique_ptr<NestedOrder> future_order(std::vector<std::uint64_t> masses);

}  // namespace kvlab
