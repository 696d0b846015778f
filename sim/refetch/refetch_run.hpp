// One configuration on one KV head with refetch: an evicted token returns when a query selects it
// (docs/guides/refetch.md).
//
// A measured query takes these steps:
//
//   1. The tokens that the query selects and that are not resident are misses.
//   2. For each miss, the policy's next victim is evicted if the cache is full, and the token is
//      fetched. Selected tokens are never victims.
//   3. The query's own token is appended. If the cache is full, a victim is evicted first.
//   4. The query attends to the selected tokens, the protected tokens and its own token. The policy
//      observes this attention; a token counts as requested if it is selected.
//
// Other queries, those of a prompt, are handled as in a replay without refetch.
//
// A trace that has only selections has no rows of attention. Then a policy observes only requests:
// a query requests the tokens that it selects. The requests of a prompt are unknown.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/tally.hpp"
#include "sim/head_measure.hpp"
#include "sim/head_view.hpp"
#include "sim/oracles/oracle.hpp"
#include "sim/refetch/selection.hpp"

namespace kvlab {

/// The tokens of one cache that are on the device.
class ResidentSet : public AgedSet {
 public:
  ResidentSet(const PolicySpec& spec, std::uint32_t budget, ProtectedTokens protected_tokens,
              Identity identity)
      : AgedSet(spec, budget, protected_tokens, identity) {}
  /// A set that evicts by an oracle, which must outlive it.
  ResidentSet(Oracle& oracle, std::uint32_t budget, Identity identity)
      : AgedSet(oracle_ops(), oracle_params(oracle), budget, {}, identity) {}

  /// Evicts until at most budget - 1 tokens are live.
  void evict_to_budget(std::uint32_t now) { evict(choose_victims(now)); }
  /// Evicts the first `count` tokens in the eviction order that are not in `kept`, which has a flag
  /// for each position. At least `count` such tokens must exist.
  void evict_except(const std::vector<bool>& kept, std::uint32_t count, std::uint32_t now);
  /// The positions of the live tokens in the eviction order, if position `now` is appended next.
  std::vector<std::uint32_t> eviction_order(std::uint32_t now) const;
  using AgedSet::append;
  using AgedSet::bring_back;

 private:
  std::vector<std::uint32_t> victims_;
};

class RefetchRun {
 public:
  /// `config` is the configuration of this KV head (ResolvedConfig::head_config()). All arguments
  /// but `set` must outlive the run. If `measured` is null, nothing is measured.
  RefetchRun(ResidentSet set, const ResolvedConfig& config, const Selection& selection,
             const HeadView& view, std::uint32_t threshold16, const MeasuredQueries& selecting,
             const MeasuredQueries* measured);

  /// Runs the next query. If wants_row() is true, `rows` must have the row of the query. `rows` is
  /// null if the trace has only selections.
  void run(std::uint32_t query, SharedRows* rows);
  bool wants_row(std::uint32_t query) const;

  /// Sets a function that is called after each query with the positions (ascending) of the tokens
  /// that were resident when the query attended.
  void watch(std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher) {
    watcher_ = std::move(watcher);
  }
  const ResidentSet& set() const { return set_; }
  /// The results. Call once, after the last query.
  HeadOutcome outcome() {
    return {measure_.take().front(), set_.evictions(), set_.live_max(), set_.size()};
  }

 private:
  const Append& current_append() const { return config_.appends[next_]; }
  std::uint32_t append_end() const { return current_append().first + current_append().tokens; }
  void run_without_selection(std::uint32_t query, SharedRows* rows);
  void fetch(std::uint32_t query);
  void attend(std::uint32_t query, SharedRows* rows);
  void list_attended(std::uint32_t query);
  void add_rows(std::uint32_t query, SharedRows& rows, Tally& tally);
  void add_selection(std::uint32_t query);
  void observe(std::uint32_t query, const Tally& tally);

  ResidentSet set_;
  const ResolvedConfig& config_;
  const Selection& selection_;
  HeadView view_;
  std::uint32_t threshold16_;
  const MeasuredQueries& selecting_;
  TokenFeatures features_;
  HeadMeasure measure_;
  std::function<void(std::uint32_t, std::span<const std::uint32_t>)> watcher_;
  std::size_t next_ = 0;        // index of the append in progress
  Tally tally_;                 // the attention received in a prompt's append
  std::vector<bool> selected_;  // [token]: whether the query in progress selects it
  // The tokens to fetch, and the tokens to which the query attends: positions, ages.
  std::vector<std::uint32_t> missing_, attended_, ages_;
  std::vector<float> p_, by_age_;
};

/// Takes one KV head through all runs. `rows` is null if the trace has only selections.
void run_with_refetch(std::uint32_t tokens, SharedRows* rows,
                      std::span<const std::unique_ptr<RefetchRun>> runs);

}  // namespace kvlab
