// The configuration batch of nested orders: where a rank depends neither on the budget nor on what
// was evicted, the live set of a budget lies within that of every larger one. So one stack serves
// all budgets: a token is kept at the level of the smallest budget that still has it, a victim of
// one level drops to the next, and running sums over levels give every budget's metrics at once
// (Mattson et al. 1970).
//
// The one place beside policies/aged_set.hpp that holds the rule of eviction: what one set decides
// by itself, the stack decides for all budgets at once. Tests hold it to the plain replay.
#pragma once

#include "sim/config_batches/config_batch.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

/// Ranks of tokens by position, for `now`.
class NestedOrder {
 public:
  virtual ~NestedOrder() = default;
  virtual void rank(std::span<const std::uint32_t> positions, std::uint32_t now,
                    std::span<std::uint64_t> ranks) const = 0;
  /// The tokens [first, first + count) enter.
  virtual void append(std::uint32_t first, std::uint32_t count) = 0;
  /// Every cache of the configuration batch has attended `query`.
  virtual void spend(std::uint32_t query, GroupRows& rows) = 0;
  virtual bool wants_rows() const = 0;
  /// Whether ranks are positions: rank() need not be asked then.
  virtual bool oldest_first() const = 0;
};

class NestedConfigBatch final : public ConfigBatch {
 public:
  /// `configs`: one order, one prefill and the same protected tokens, by rising budget. `measured`
  /// may be null: nothing is measured.
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
  /// A victim that is being demoted.
  struct EvictionCandidate {
    std::uint32_t position;
    std::uint64_t rank;
  };
  void begin_append(const Append& append);
  bool takes_one(const Append& append) const;
  void pass_down(std::uint32_t now);
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
      tokens_;                        // live at a level and at no smaller budget; ascending in each
  std::vector<std::size_t> begins_;   // [level + 1]: where the levels lie in tokens_
  std::uint32_t unseen_ = 0;          // of the append's tokens, by the current query
  std::vector<std::uint64_t> ranks_;  // [tokens]
  std::vector<double> running_;       // [level][heads]: sums of the current query, running
  std::vector<std::uint32_t> hits_;   // [level][heads]: hits of the current query, running
  std::vector<double> inverse_;       // [group]: of the row's sums
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
/// `oracle_attention`: least future mass of the full cache first. `masses` [token]: all that it
/// gives.
std::unique_ptr<NestedOrder> future_order(std::vector<std::uint64_t> masses);

}  // namespace kvlab
