// One configuration of the feedback configuration batch. feedback_run.cpp explains how a query is
// processed.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "policies/tiers/tier_plan.hpp"
#include "sim/config_batches/config_batch.hpp"
#include "sim/config_batches/feedback/aged_cache.hpp"
#include "sim/config_batches/group_rows.hpp"
#include "sim/config_batches/output_chain.hpp"
#include "sim/oracles/oracle.hpp"
#include "sim/row_measure.hpp"

namespace kvlab {

/// A KV head's tokens as one tier stores them, and the attention rows over them. What a tier stores
/// for a token depends only on the token's key and value, and on the formats of the tiers through
/// which the token was demoted. So all configurations with the same demotion path share a TierRow.
struct TierRow {
  GroupRows rows;             ///< rows of quantized keys
  std::vector<float> values;  ///< [token, dim], after the Hadamard rotation
};

class TierRows {
 public:
  /// The data of `view`, and `rope`, must outlive this. Throws std::invalid_argument if the head
  /// size is not a multiple of the block size of quantized formats.
  TierRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// The TierRow of each tier of a tier plan; null for a tier that is not quantized.
  std::vector<TierRow*> rows(std::span<const TierSlots> tier_plan);
  /// Computes the rows of queries [first, first + count), for all tiers that rows() has returned so
  /// far.
  void compute(std::uint32_t first, std::uint32_t count);

 private:
  std::unique_ptr<TierRow> quantize(const std::vector<KvFormat>& path) const;

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  std::map<std::vector<KvFormat>, std::unique_ptr<TierRow>> rows_;  // key: the demotion path
};

/// Buffers that the configurations of a batch use one after another. In the comments, heads is the
/// number of query heads, padded to whole head groups.
struct GatherScratch {
  // [head group][age][4]: exponentials of the live tokens; see kept_of()
  AlignedVector<float> kept;
  AlignedVector<std::uint64_t> mass;     // [age]: mass that the query gives each token
  std::vector<std::uint32_t> requested;  // [age]: whether a head requests the token
  // [heads]: the sum and the largest of the exponentials in `kept`, the smallest exponential with
  // which a token counts as requested, and the sum of the full cache's exponentials over the live
  // tokens (add_shared()).
  std::vector<float> sum, max_exponential, request_threshold, shared;
  // [heads]: whether the exponentials of the head were computed again, relative to the maximum over
  // the live tokens
  std::vector<bool> lost;
  std::vector<float> row;  // [age]: logits or exponentials of one head
  // At cache positions: products of queries and old keys, [4][age], and the rotated queries,
  // [4][dim].
  AlignedVector<float> products, rotated;
  std::vector<std::uint32_t> ages;    // the numbers 0, 1, 2, …
  std::vector<std::uint8_t> source;   // [age]: the token's index in `sources`
  std::vector<std::uint32_t> picked;  // positions of the tokens of one source
  AlignedVector<float> weights;       // [picked][4]: their exponentials
  /// Where the exponentials of tokens are read from. There is one source for each tier. The last
  /// source is for the tokens of the append in progress, which are not quantized yet. A source is a
  /// row of exponentials and, for each head, the factor that converts them to the common shift.
  std::vector<std::pair<const float*, std::array<float, kHeadGroupSize>>> sources;
  std::vector<float> outputs;  // [heads][dim]: sums of values times exponentials
  // [group]: `outputs` times these factors are the attention outputs
  std::vector<float> factors;
  OutputChain chain;

  void resize(std::size_t tokens, std::uint32_t heads);
  /// The part of `kept` that belongs to a head group, [age][4].
  float* kept_of(std::size_t head_group) {
    return kept.data() + head_group * mass.size() * kHeadGroupSize;
  }
  /// The element of `kept` that belongs to the token of age `i` and to a query head.
  float& kept_at(std::size_t i, std::size_t head) {
    return kept_of(head / kHeadGroupSize)[i * kHeadGroupSize + head % kHeadGroupSize];
  }
};

class FeedbackRun {
 public:
  /// `quantized`: the rows of all tiers; null if no configuration of the batch has a tier plan.
  /// `oracle`: ranks the tokens for `oracle_attention`, and must outlive this object; null if no
  /// configuration of the batch is `oracle_attention`.
  FeedbackRun(const ResolvedConfig& config, LiveSet::Identity identity, const HeadView& view,
              const MeasuredQueries* measured, TierRows* quantized, Oracle* oracle);

  /// `rows`: the full cache's rows. `unrounded`: its rows of unrounded logits. `unrounded` and
  /// `positions_in_cache` are null at original positions.
  void attend(std::uint32_t query, GroupRows& rows, GroupRows* unrounded,
              const CachePositionTable* positions_in_cache, GatherScratch& scratch);

  const AgedCache& cache() const { return cache_; }
  AgedSet& aged_set() { return cache_; }
  /// The results. Call once, after the last query.
  HeadOutcome outcome() {
    return {measure_.take().front(), cache_.evictions(), cache_.live_max(), cache_.size()};
  }
  /// The live tokens that the last query could attend to.
  std::span<const std::uint32_t> visible() const { return cache_.positions().first(visible_); }

  /// The first token whose exponentials at cache positions are shared. An earlier token is not
  /// live, or this run computes its exponentials.
  std::uint32_t first_shared() const {
    return old_keys_.size() < cache_.size() ? cache_.positions()[old_keys_.size()] : 0;
  }

 private:
  bool observes(std::uint32_t query) const;
  void evict_to_budget(std::uint32_t now);
  void see_all(std::uint32_t query, GroupRows& rows);
  bool find_quantized(GatherScratch& scratch) const;
  /// The TierRow of a source; null for the full cache's row, whose tokens are not quantized.
  const TierRow* row_of(std::uint8_t source) const {
    return source < tiers_.size() ? tiers_[source] : nullptr;
  }
  void see_quantized(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void take_quantized(std::uint32_t query, std::uint32_t head_group, const GroupRows& rows,
                      GatherScratch& scratch) const;
  void take_own_quantized(std::uint32_t query, std::uint32_t head, const GroupRows& rows,
                          GatherScratch& scratch) const;
  void measure_quantization(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void take_quantized_outputs(const GroupRows& rows, GatherScratch& scratch) const;
  void add_values_of(const TierRow* from, GatherScratch& scratch, float* out) const;
  void observe_all(std::uint32_t query, GroupRows& rows);
  void see_cache_positions(std::uint32_t query, GroupRows& rows, GroupRows& unrounded,
                           const CachePositionTable& positions_in_cache, GatherScratch& scratch);
  void take_cache_positions(std::uint32_t query, GroupRows& unrounded,
                            const CachePositionTable& positions_in_cache, GatherScratch& scratch);
  /// Whether the mass of a token is the largest of the masses that the query heads of a group give
  /// it (true), or their sum (false).
  bool by_largest() const { return cache_.modifiers().group == Modifiers::Group::max; }
  bool has_whole_row(std::uint32_t query) const;
  void take_whole(std::uint32_t query, const GroupRows& unrounded, GatherScratch& scratch) const;
  void rotate_queries(std::uint32_t query, std::uint32_t head_group,
                      const CachePositionTable& positions_in_cache, GatherScratch& scratch,
                      const float** queries) const;
  void take_own_cache_positions(std::uint32_t query, std::uint32_t head, const GroupRows& unrounded,
                                GatherScratch& scratch);
  void add_shared(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) const;
  void observe_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void see_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void take_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void take_kept_outputs(std::uint32_t query, const GroupRows& rows, GatherScratch& scratch) const;
  void gather_kept(std::uint32_t query, const GroupRows& rows, GatherScratch& scratch) const;
  void take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows,
                        GatherScratch& scratch);
  void take_own_row(std::uint32_t head, GatherScratch& scratch) const;
  void take_masses(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void take_requests(std::uint32_t query, GroupRows& rows, GatherScratch& scratch);
  void add_masses(const std::uint64_t* mass);
  void add_requests(std::uint32_t query, const std::uint32_t* requested);
  void measure(std::uint32_t query, GroupRows& rows, const float* shared);
  void take_cache_position_outputs(std::uint32_t query, GroupRows& unrounded,
                                   GatherScratch& scratch) const;
  void take_own_outputs(GatherScratch& scratch) const;
  /// Whether a measured query's outputs are needed.
  bool takes_outputs(std::uint32_t query, const GroupRows& rows) const {
    return rows.gradient_samples() > 0 || measure_.samples(query);
  }
  void measure_outputs(std::uint32_t query, GroupRows& rows, GatherScratch* scratch);
  void begin_observing();
  float weight_of(std::uint32_t query) const { return cache_.weight(cursor_.age_of(query)); }

  AgedCache cache_;
  std::vector<TierRow*> tiers_;  // [tier]; null: not quantized; empty: no tier is quantized
  TokenFeatures features_;
  bool cache_positions_;
  // The keys of the live tokens that are older than an evicted token. The other live tokens are
  // consecutive.
  AgedKeys old_keys_;
  AppendCursor cursor_;
  const HeadView& view_;
  RowMeasure measure_;
  std::uint32_t visible_ = 0;
  Seen seen_;  // observations of the append in progress
  // [age], for an append of several queries: masses summed over its queries
  std::vector<std::uint64_t> mass_;
  std::vector<std::uint32_t> requests_, last_request_;
};

}  // namespace kvlab
