// A run processes its KV head query by query. attend() evicts and appends when an append begins.
// Then it attends with the query, if the policy observes it or a metric measures it. When the
// append ends, it passes the observations to the policy.
//
// The exponentials of a query were computed once for all runs, as rows of the full cache
// (GroupRows). They are relative to the maximum of the whole row. A run reads those of its live
// tokens, and sums them. Which rows it reads depends on the tokens:
//
//   see_all()               no token was evicted or quantized: sums and observations of the whole
//                           row, which all runs share
//   see_kept()              exact tokens at original positions: the row of the full cache
//   see_quantized()         some tokens are on quantized tiers: the row of each token's tier
//   see_cache_positions()   old keys (old_keys_): computed here. Other tokens: the row of unrounded
//                           logits
//
// Each of these functions fills the scratch memory, observes, and then measures: first recall and
// misses, which always come from the row of the full cache (scratch.shared), then the outputs.
//
// If the sum of a head's exponentials is below kSharedSumFloor, they have lost precision. Then the
// functions take_own_...() compute the head's exponentials again, relative to the maximum over the
// live tokens, and mark the head in scratch.lost. A head group is four query heads
// (kHeadGroupSize). An index `i` among the live tokens is an age: 0 is the oldest token.
#include "sim/config_batches/feedback/feedback_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "policies/observation.hpp"
#include "sim/cache/host_cache.hpp"
#include "traces/base/numeric/quantize.hpp"
#include "traces/base/numeric/softmax.hpp"

namespace kvlab {
namespace {

/// The configuration's empty cache. A configuration without a policy evicts by the oracle.
AgedCache make_cache(const ResolvedConfig& config, LiveSet::Identity identity, std::uint32_t tokens,
                     Oracle* oracle) {
  if (!config.policy.entry) return {*oracle, config.budget_tokens, identity, tokens};
  return {config.policy, config.budget_tokens, config.protected_tokens, identity, tokens};
}

}  // namespace

void GatherScratch::resize(std::size_t tokens, std::uint32_t heads) {
  const std::size_t size = whole_blocks(tokens);
  if (mass.size() < size) {
    ages.resize(size);
    std::iota(ages.begin(), ages.end(), 0u);
    kept.resize(size * heads);
    mass.resize(size);
    requested.resize(size);
    row.resize(size);
  }
  sum.resize(heads);
  max_exponential.resize(heads);
  shared.resize(heads);
  lost.assign(heads, false);
  request_threshold.assign(heads, std::numeric_limits<float>::infinity());
}

FeedbackRun::FeedbackRun(const ResolvedConfig& config, LiveSet::Identity identity,
                         const HeadView& view, const MeasuredQueries* measured, TierRows* quantized,
                         Oracle* oracle)
    : cache_(make_cache(config, identity, view.tokens, oracle)),
      features_(cache_.features(), view, config.appends),
      cache_positions_(config.positions == Positions::cache),
      old_keys_(view),
      cursor_(config.appends),
      view_(view),
      measure_(measured, 1, view) {
  if (config.shares_slots()) cache_.share_slots();
  if (const auto own = config.tiers.find(config.budget_tokens); own != config.tiers.end())
    cache_.keep_at(own->second);
  if (!cache_.is_quantized()) return;
  tiers_ = quantized->rows(cache_.tier_plan());
  if (measured) measure_.separate_quantization();
}

/// Whether the policy needs the observations of a query. Queries older than its tail have weight 0.
bool FeedbackRun::observes(std::uint32_t query) const {
  if (cache_.needs() == Needs::nothing) return false;
  return needs_requests(cache_.needs()) || cursor_.age_of(query) < cache_.tail();
}

/// Whether this run can use the observations that are shared by all caches that have evicted
/// nothing yet. This requires that its own cache has evicted nothing. If the policy needs masses,
/// they also must be unweighted sums over the heads.
bool FeedbackRun::has_whole_row(std::uint32_t query) const {
  return visible_ == query + 1 &&
         (!needs_mass(cache_.needs()) || (weight_of(query) == 1.0f && !by_largest()));
}

/// visible_ is the number of live tokens that the query sees. The tokens of later queries of the
/// same append are live already, and are the youngest.
void FeedbackRun::attend(std::uint32_t query, GroupRows& rows, GroupRows* unrounded,
                         const CachePositionTable* positions_in_cache, GatherScratch& scratch) {
  if (cursor_.begins_at(query)) {
    evict_to_budget(query);
    cache_.append(query, cursor_.current().tokens, features_.from(query));
    begin_observing();
  }
  visible_ = cache_.size() - cursor_.age_of(query);
  if (observes(query) || measure_.measures(query)) {
    if (cache_positions_)
      see_cache_positions(query, rows, *unrounded, *positions_in_cache, scratch);
    else if (find_quantized(scratch))
      see_quantized(query, rows, scratch);
    else if (has_whole_row(query))
      see_all(query, rows);
    else
      see_kept(query, rows, scratch);
  }
  if (!cursor_.ends_at(query)) return;
  cache_.observe(seen_);
  if (cursor_.current().ends_prompt) cache_.end_prompt();
  cursor_.advance();
}

/// Evicts to the budget. At cache positions, it then adds the keys of live tokens that are older
/// than a victim to old_keys_.
void FeedbackRun::evict_to_budget(std::uint32_t now) {
  const std::size_t before = old_keys_.size();
  const auto victims = cache_.evict_to_budget(now);
  if (!cache_positions_ || victims.empty()) return;
  const auto live = cache_.positions();
  if (victims.size() == 1 && victims[0] < before) return old_keys_.erase(victims[0]);
  std::size_t old = victims[0];
  if (victims.size() > 1) {
    old_keys_.clear();
    // The tokens that are younger than every victim are the consecutive ones before `now`.
    for (old = live.size(); old > 0 && live[old - 1] + 1 == now - (live.size() - old);) --old;
  }
  for (std::size_t i = old_keys_.size(); i < old; ++i) old_keys_.append(live[i]);
}

void FeedbackRun::begin_observing() {
  seen_ = {.query = cursor_.current().first + cursor_.current().tokens - 1,
           .queries = cursor_.current().tokens};
  // For a single query, add_masses() and add_requests() set the pointers of seen_.
  if (seen_.queries == 1 && cache_.tail() > 0) return;
  mass_.assign(needs_mass(cache_.needs()) ? cache_.size() : 0, 0);
  requests_.assign(needs_requests(cache_.needs()) ? cache_.size() : 0, 0);
  last_request_.assign(requests_.size(), 0);
  seen_.mass = mass_.data();
  seen_.requests = requests_.data();
  seen_.last_request = last_request_.data();
}

/// Observes the whole row, if has_whole_row().
void FeedbackRun::observe_all(std::uint32_t query, GroupRows& rows) {
  if (!observes(query)) return;
  if (needs_requests(cache_.needs())) add_requests(query, rows.request_flags(query));
  if (needs_mass(cache_.needs())) add_masses(rows.masses(query));
}

void FeedbackRun::see_all(std::uint32_t query, GroupRows& rows) {
  observe_all(query, rows);
  if (!measure_.measures(query)) return;
  measure(query, rows, rows.sums(query));
  measure_outputs(query, rows, nullptr);
}

/// Gathers the exponentials of the live tokens and sums them. Recall is computed from these sums.
void FeedbackRun::gather_kept(std::uint32_t query, const GroupRows& rows,
                              GatherScratch& scratch) const {
  scratch.resize(visible_, rows.heads());
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().gather(rows.e(query, head_group), cache_.positions().data(), visible_,
                       scratch.kept_of(head_group),
                       scratch.sum.data() + head_group * kHeadGroupSize,
                       scratch.max_exponential.data() + head_group * kHeadGroupSize);
  scratch.shared = scratch.sum;
}

/// Gathers the exponentials of the live tokens. Heads that lost precision are computed again.
void FeedbackRun::take_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  gather_kept(query, rows, scratch);
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    if (scratch.sum[head] < kSharedSumFloor) take_own_maximum(query, head, rows, scratch);
}

/// Adds up the values of the live tokens. The sums start from those of the run that used the
/// scratch memory before, which mostly kept the same tokens (OutputChain).
void FeedbackRun::take_kept_outputs(std::uint32_t query, const GroupRows& rows,
                                    GatherScratch& scratch) const {
  const float* const values =
      scratch.chain.move_to(query, rows, cache_.live_bits(), scratch.sum.data());
  scratch.outputs.assign(values, values + rows.heads() * std::size_t{view_.head_size});
  take_own_outputs(scratch);
}

void FeedbackRun::see_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  take_kept(query, rows, scratch);
  observe_kept(query, rows, scratch);
  if (!measure_.measures(query)) return;
  measure(query, rows, scratch.shared.data());
  if (visible_ == query + 1) return measure_outputs(query, rows, nullptr);
  if (!takes_outputs(query, rows)) return;
  take_kept_outputs(query, rows, scratch);
  measure_outputs(query, rows, &scratch);
}

/// Writes the source of each token to scratch.source. Returns whether any token is quantized.
/// Tokens of an append of several tokens stay in 16 bit until the append has ended.
bool FeedbackRun::find_quantized(GatherScratch& scratch) const {
  if (tiers_.empty()) return false;
  const auto tiers = cache_.tiers();
  scratch.source.assign(visible_, 0);
  std::ranges::copy(tiers.first(std::min<std::size_t>(tiers.size(), visible_)),
                    scratch.source.begin());
  const Append& append = cursor_.current();
  const auto exact = static_cast<std::uint8_t>(tiers_.size());  // see GatherScratch::sources
  for (std::uint32_t end = visible_; append.tokens > 1 && end > 0; --end) {
    if (cache_.positions()[end - 1] < append.first) break;
    scratch.source[end - 1] = exact;
  }
  return std::ranges::any_of(scratch.source, [&](std::uint8_t source) { return row_of(source); });
}

/// Computes probabilities from the rows of the tiers, and recall and misses from the rows of the
/// full cache.
void FeedbackRun::see_quantized(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  gather_kept(query, rows, scratch);
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    take_quantized(query, head_group, rows, scratch);
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    if (scratch.sum[head] < kSharedSumFloor) take_own_quantized(query, head, rows, scratch);
  observe_kept(query, rows, scratch);
  if (!measure_.measures(query)) return;
  measure(query, rows, scratch.shared.data());
  if (!takes_outputs(query, rows)) return;
  take_quantized_outputs(rows, scratch);
  measure_outputs(query, rows, &scratch);
  if (measure_.wants_quantization(query)) measure_quantization(query, rows, scratch);
}

/// Measures the error of quantization: the difference between scratch.outputs and the outputs that
/// the same tokens give in 16 bit. Overwrites the scratch memory.
void FeedbackRun::measure_quantization(std::uint32_t query, GroupRows& rows,
                                       GatherScratch& scratch) {
  const std::vector<float> quantized = scratch.outputs, sums = scratch.sum;
  take_kept(query, rows, scratch);
  take_kept_outputs(query, rows, scratch);
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    float* const exact = scratch.outputs.data() + head * std::size_t{view_.head_size};
    scale(exact, view_.head_size, 1 / scratch.sum[head]);
    measure_.add_quantization(0, head, exact, quantized.data() + (exact - scratch.outputs.data()),
                              1 / sums[head]);
  }
}

/// Replaces the gathered exponentials of quantized tokens by exponentials from the rows of their
/// tiers. The rows of the tiers and of the full cache may have different shifts, so all
/// exponentials are converted to the largest of these shifts. The conversion multiplies by a power
/// of two, so it is exact.
void FeedbackRun::take_quantized(std::uint32_t query, std::uint32_t head_group,
                                 const GroupRows& rows, GatherScratch& scratch) const {
  std::int32_t shift[kHeadGroupSize];
  std::copy_n(rows.shifts(query) + head_group * kHeadGroupSize, kHeadGroupSize, shift);
  for (const TierRow* const tier : tiers_)
    for (std::size_t h = 0; tier && h < kHeadGroupSize; ++h)
      shift[h] = std::max(shift[h], tier->rows.shifts(query)[head_group * kHeadGroupSize + h]);
  const auto factors = [&](const GroupRows& source) {
    std::array<float, kHeadGroupSize> factor;
    for (std::size_t h = 0; h < kHeadGroupSize; ++h)
      factor[h] =
          std::ldexp(1.0f, source.shifts(query)[head_group * kHeadGroupSize + h] - shift[h]);
    return factor;
  };
  scratch.sources.clear();
  for (const TierRow* const tier : tiers_) {
    const GroupRows& source = tier ? tier->rows : rows;
    scratch.sources.push_back({source.e(query, head_group), factors(source)});
  }
  // The last source is the full cache's row, for tokens of the append in progress.
  scratch.sources.push_back({rows.e(query, head_group), factors(rows)});

  float* const kept = scratch.kept_of(head_group);
  const std::uint32_t* const positions = cache_.positions().data();
  for (std::size_t i = 0; i < visible_; ++i) {
    const auto& [e, factor] = scratch.sources[scratch.source[i]];
    std::array<float, kHeadGroupSize> own;
    for (std::size_t h = 0; h < kHeadGroupSize; ++h)
      own[h] = e[positions[i] * kHeadGroupSize + h] * factor[h];
    std::ranges::copy(own, kept + i * kHeadGroupSize);
  }
  row_loops().gather(kept, scratch.ages.data(), visible_, kept,
                     scratch.sum.data() + head_group * kHeadGroupSize,
                     scratch.max_exponential.data() + head_group * kHeadGroupSize);
}

/// Computes one head's exponentials again, relative to the maximum over the live tokens.
void FeedbackRun::take_own_quantized(std::uint32_t query, std::uint32_t head, const GroupRows& rows,
                                     GatherScratch& scratch) const {
  for (std::size_t i = 0; i < visible_; ++i) {
    const TierRow* const from = row_of(scratch.source[i]);
    (from ? from->rows : rows).logits(query, head, visible().subspan(i, 1), scratch.row.data() + i);
  }
  take_own_row(head, scratch);
}

/// Multiplies the values of the tokens whose TierRow is `from` by their exponentials, and adds the
/// products to out [heads][dim].
void FeedbackRun::add_values_of(const TierRow* from, GatherScratch& scratch, float* out) const {
  const std::size_t dim = view_.head_size,
                    head_groups = (view_.group + kHeadGroupSize - 1) / kHeadGroupSize;
  for (std::uint32_t head_group = 0; head_group < head_groups; ++head_group) {
    const float* const kept = scratch.kept_of(head_group);
    scratch.picked.clear();
    scratch.weights.resize(scratch.mass.size() * kHeadGroupSize);
    for (std::size_t i = 0; i < visible_; ++i) {
      if (row_of(scratch.source[i]) != from) continue;
      std::copy_n(kept + i * kHeadGroupSize, kHeadGroupSize,
                  scratch.weights.data() + scratch.picked.size() * kHeadGroupSize);
      scratch.picked.push_back(cache_.positions()[i]);
    }
    row_loops().accumulate(scratch.weights.data(), scratch.picked.data(), scratch.picked.size(),
                           view_.heads_in(head_group), from ? from->values.data() : view_.v,
                           from ? dim : view_.kv_token_stride, dim,
                           out + head_group * kHeadGroupSize * dim);
  }
}

/// Adds up the values of the live tokens. Quantized values are stored after the Hadamard rotation,
/// so their sum is rotated back; rotating twice multiplies by kQuantBlock. All sums use
/// scratch.kept, so a head that lost precision needs no other treatment.
void FeedbackRun::take_quantized_outputs(const GroupRows& rows, GatherScratch& scratch) const {
  const std::size_t dim = view_.head_size, size = rows.heads() * dim;
  std::vector<float> quantized(size);
  scratch.outputs.assign(size, 0.0f);
  add_values_of(nullptr, scratch, scratch.outputs.data());
  // Tiers of one format that follow each other share a TierRow, whose tokens are added once.
  for (std::size_t tier = 0; tier < tiers_.size(); ++tier)
    if (tiers_[tier] && (tier == 0 || tiers_[tier] != tiers_[tier - 1]))
      add_values_of(tiers_[tier], scratch, quantized.data());
  hadamard_rotate(quantized);
  for (std::size_t d = 0; d < size; ++d) scratch.outputs[d] += quantized[d] / kQuantBlock;
}

/// Computes the outputs of the heads that are marked in scratch.lost, from their gathered
/// exponentials. The exponentials of such a head are relative to the maximum over the live tokens.
/// The shared sums of values have another scale, so they cannot be used.
void FeedbackRun::take_own_outputs(GatherScratch& scratch) const {
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    if (!scratch.lost[head]) continue;
    for (std::size_t i = 0; i < visible_; ++i) scratch.row[i] = scratch.kept_at(i, head);
    float* const out = scratch.outputs.data() + head * std::size_t{view_.head_size};
    std::fill(out, out + view_.head_size, 0.0f);
    accumulate_rows(std::span(scratch.row).first(visible_), visible(), view_.v,
                    view_.kv_token_stride, view_.head_size, out);
  }
}

/// Measures how the outputs change the query's log-likelihoods and, if the query is sampled, the
/// errors of the outputs. The outputs are those in scratch.outputs and scratch.sum. If `scratch` is
/// null, the outputs equal those of the full cache.
void FeedbackRun::measure_outputs(std::uint32_t query, GroupRows& rows, GatherScratch* scratch) {
  const std::size_t dim = view_.head_size;
  if (scratch && rows.gradient_samples() > 0) {
    scratch->factors.resize(view_.group);
    for (std::uint32_t head = 0; head < view_.group; ++head)
      scratch->factors[head] = 1 / scratch->sum[head];
    rows.add_changes(query, scratch->outputs.data(), scratch->factors.data(),
                     measure_.changes(0, rows.gradient_samples()));
  }
  if (!measure_.samples(query)) return;
  for (std::uint32_t head = 0; head < view_.group; ++head) {
    const float* const full = rows.outputs(query) + head * dim;
    const float* const kept = scratch ? scratch->outputs.data() + head * dim : nullptr;
    const float factor = scratch ? 1 / scratch->sum[head] : 1;
    const double error = scratch ? row_loops().distance2(full, kept, factor, dim) : 0;
    measure_.add_output(0, head, error, rows.norms2(query)[head], full, kept, factor);
  }
}

void FeedbackRun::observe_kept(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  if (!observes(query)) return;
  if (needs_mass(cache_.needs())) take_masses(query, rows, scratch);
  if (needs_requests(cache_.needs())) take_requests(query, rows, scratch);
}

/// Computes probabilities from logits at cache positions, and recall and misses from the rows of
/// the full cache.
void FeedbackRun::see_cache_positions(std::uint32_t query, GroupRows& rows, GroupRows& unrounded,
                                      const CachePositionTable& positions_in_cache,
                                      GatherScratch& scratch) {
  scratch.resize(visible_, rows.heads());
  const bool outputs = measure_.measures(query) && takes_outputs(query, rows),
             whole = has_whole_row(query);
  if (whole)
    take_whole(query, unrounded, scratch);
  else if (observes(query) || outputs)
    take_cache_positions(query, unrounded, positions_in_cache, scratch);
  if (whole)
    observe_all(query, unrounded);
  else
    observe_kept(query, rows, scratch);
  if (!measure_.measures(query)) return;
  if (!whole) add_shared(query, rows, scratch);
  measure(query, rows, scratch.shared.data());
  if (!outputs) return;
  take_cache_position_outputs(query, unrounded, scratch);
  measure_outputs(query, rows, &scratch);
}

/// Uses the shared row of unrounded logits. This is possible because all tokens are live, so all
/// cache positions are original positions.
void FeedbackRun::take_whole(std::uint32_t query, const GroupRows& unrounded,
                             GatherScratch& scratch) const {
  scratch.sum.assign(unrounded.sums(query), unrounded.sums(query) + unrounded.heads());
}

/// Adds up the values of the live tokens. The values of the oldest tokens (those of old_keys_) are
/// weighted by this run's exponentials. The values of the other tokens, which are consecutive, are
/// weighted by the shared exponentials.
void FeedbackRun::take_cache_position_outputs(std::uint32_t query, GroupRows& unrounded,
                                              GatherScratch& scratch) const {
  const std::size_t dim = view_.head_size, old = old_keys_.size();
  scratch.outputs.assign(unrounded.heads() * dim, 0.0f);
  for (std::uint32_t head_group = 0; head_group < unrounded.head_groups(); ++head_group)
    row_loops().accumulate(scratch.kept_of(head_group), cache_.positions().data(), old,
                           view_.heads_in(head_group), view_.v, view_.kv_token_stride, dim,
                           scratch.outputs.data() + head_group * kHeadGroupSize * dim);
  const float* const young = unrounded.values_from(query, cache_.positions()[old]);
  for (std::size_t d = 0; d < scratch.outputs.size(); ++d) scratch.outputs[d] += young[d];
  take_own_outputs(scratch);
}

/// Sums the full cache's exponentials over the live set, for each head. The live tokens that are
/// not in old_keys_ are consecutive, so their sum comes from sums_from(). Rounding could make the
/// total exceed the sum of the whole row, so the total is limited to that sum.
void FeedbackRun::add_shared(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) const {
  const auto live = visible();
  const std::size_t old = old_keys_.size();
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group) {
    float scattered[kHeadGroupSize];
    std::uint32_t unused[kHeadGroupSize] = {};  // counts of requests
    row_loops().total(rows.e(query, head_group), live.data(), old, scratch.request_threshold.data(),
                      scattered, unused);
    const auto following = rows.sums_from(query, head_group, live[old]);
    for (std::size_t h = 0; h < kHeadGroupSize; ++h)
      scratch.shared[head_group * kHeadGroupSize + h] =
          std::min(static_cast<float>(following[h]) + scattered[h],
                   rows.sums(query)[head_group * kHeadGroupSize + h]);
  }
}

/// Rotates a head group's queries to their cache positions.
void FeedbackRun::rotate_queries(std::uint32_t query, std::uint32_t head_group,
                                 const CachePositionTable& positions_in_cache,
                                 GatherScratch& scratch, const float** queries) const {
  const std::size_t dim = view_.head_size;
  scratch.rotated.resize(kHeadGroupSize * dim);
  for (std::uint32_t h = 0; h < kHeadGroupSize && head_group * kHeadGroupSize + h < view_.group;
       ++h) {
    float* const to = scratch.rotated.data() + h * dim;
    positions_in_cache.rope().rotate(view_.query(head_group * kHeadGroupSize + h, query), dim,
                                     visible_ - 1, to);
    queries[h] = to;
  }
}

/// Gathers the exponentials of logits at cache positions. The exponentials of tokens that are older
/// than an evicted token are computed here. Those of the other tokens come from the shared row of
/// unrounded logits.
void FeedbackRun::take_cache_positions(std::uint32_t query, GroupRows& unrounded,
                                       const CachePositionTable& positions_in_cache,
                                       GatherScratch& scratch) {
  const std::size_t old = old_keys_.size(), stride = scratch.mass.size() + kPanelTokens;
  scratch.products.resize(stride * kHeadGroupSize);
  for (std::uint32_t head_group = 0; head_group < unrounded.head_groups(); ++head_group) {
    const float *queries[kHeadGroupSize] = {}, *products[kHeadGroupSize] = {};
    rotate_queries(query, head_group, positions_in_cache, scratch, queries);
    for (std::size_t h = 0; h < kHeadGroupSize && queries[h]; ++h)
      products[h] = scratch.products.data() + h * stride;
    old_keys_.products(queries, positions_in_cache, scratch.products.data(), stride);
    row_loops().join(products, old, unrounded.softmax_scale(),
                     unrounded.shifts(query) + head_group * kHeadGroupSize,
                     unrounded.e(query, head_group) + cache_.positions()[old] * kHeadGroupSize,
                     visible_ - old, scratch.kept_of(head_group),
                     scratch.sum.data() + head_group * kHeadGroupSize,
                     scratch.max_exponential.data() + head_group * kHeadGroupSize);
    for (std::uint32_t h = 0; h < kHeadGroupSize && products[h]; ++h)
      if (scratch.sum[head_group * kHeadGroupSize + h] < kSharedSumFloor)
        take_own_cache_positions(query, head_group * kHeadGroupSize + h, unrounded, scratch);
  }
}

/// Computes one head's exponentials relative to the maximum over the live tokens. scratch.products
/// must hold the products with the old keys.
void FeedbackRun::take_own_cache_positions(std::uint32_t query, std::uint32_t head,
                                           const GroupRows& unrounded, GatherScratch& scratch) {
  const std::size_t old = old_keys_.size(), stride = scratch.mass.size() + kPanelTokens;
  std::copy_n(scratch.products.data() + head % kHeadGroupSize * stride, old, scratch.row.data());
  scale(scratch.row.data(), old, unrounded.softmax_scale());
  unrounded.logits(query, head, visible().subspan(old), scratch.row.data() + old);
  take_own_row(head, scratch);
}

/// Computes one head's exponentials again, relative to the maximum over the live tokens. This is
/// needed if the shared exponentials, which are relative to the maximum of the whole row, have lost
/// precision.
void FeedbackRun::take_own_maximum(std::uint32_t query, std::uint32_t head, GroupRows& rows,
                                   GatherScratch& scratch) {
  rows.logits(query, head, visible(), scratch.row.data());
  take_own_row(head, scratch);
}

/// Computes a head's gathered exponentials from the logits in scratch.row.
void FeedbackRun::take_own_row(std::uint32_t head, GatherScratch& scratch) const {
  scratch.lost[head] = true;
  shared_exponentials(scratch.row.data(), visible_, scratch.row.data());
  scratch.sum[head] = lane_sum(scratch.row.data(), visible_);
  scratch.max_exponential[head] =
      *std::max_element(scratch.row.begin(), scratch.row.begin() + visible_);
  for (std::size_t i = 0; i < visible_; ++i) scratch.kept_at(i, head) = scratch.row[i];
}

/// Computes the mass that the query gives each live token, and adds it to the observations.
void FeedbackRun::take_masses(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  const float weight = weight_of(query);
  if (weight != 1.0f || by_largest()) {
    std::fill(scratch.mass.begin(), scratch.mass.begin() + visible_, std::uint64_t{0});
    for (std::uint32_t head = 0; head < rows.group(); ++head)
      for (std::size_t i = 0; i < visible_; ++i) {
        const std::uint64_t mass = fixed_mass(weight, scratch.kept_at(i, head) / scratch.sum[head]);
        scratch.mass[i] = by_largest() ? std::max(scratch.mass[i], mass) : scratch.mass[i] + mass;
      }
  } else {
    for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
      row_loops().masses(scratch.kept_of(head_group), visible_,
                         scratch.sum.data() + head_group * kHeadGroupSize, head_group == 0,
                         scratch.mass.data());
  }
  add_masses(scratch.mass.data());
}

/// Finds the live tokens that the query requests, and adds them to the observations.
void FeedbackRun::take_requests(std::uint32_t query, GroupRows& rows, GatherScratch& scratch) {
  for (std::uint32_t head = 0; head < rows.group(); ++head)
    scratch.request_threshold[head] =
        min_requested(scratch.sum[head], scratch.max_exponential[head], rows.threshold16());
  for (std::uint32_t head_group = 0; head_group < rows.head_groups(); ++head_group)
    row_loops().mark(scratch.kept_of(head_group), visible_,
                     scratch.request_threshold.data() + head_group * kHeadGroupSize,
                     head_group == 0, scratch.requested.data());
  add_requests(query, scratch.requested.data());
}

/// add_masses() and add_requests(): add the observations of one query to those of the append. If
/// the append has one query, seen_ only points to them, so they must stay until cache_.observe().
void FeedbackRun::add_masses(const std::uint64_t* mass) {
  if (seen_.queries == 1) {
    seen_.mass = mass;
    return;
  }
  for (std::size_t i = 0; i < visible_; ++i) mass_[i] += mass[i];
}

void FeedbackRun::add_requests(std::uint32_t query, const std::uint32_t* requested) {
  if (seen_.queries == 1) {
    seen_.requests = requested;
    return;
  }
  for (std::size_t i = 0; i < visible_; ++i) {
    requests_[i] += requested[i];
    last_request_[i] = requested[i] ? query : last_request_[i];
  }
}

/// Measures recall and misses. `shared` [head]: sum of the full cache's exponentials over the live
/// tokens.
void FeedbackRun::measure(std::uint32_t query, GroupRows& rows, const float* shared) {
  const GroupRows::Requests wanted = rows.requests(query);
  measure_.begin_query(query);
  const bool all = visible_ == query + 1;
  const std::uint64_t* const bits = all ? nullptr : rows.request_bits(query);
  for (std::uint32_t head = 0; head < rows.group(); ++head) {
    const double sum = rows.sums(query)[head], recall = all ? 1.0 : shared[head] / sum;
    const std::uint64_t hits =
        all ? wanted.count[head]
            : row_loops().common(bits + head * rows.words(), cache_.live_bits(), query / 64 + 1);
    measure_.add(0, head,
                 {.recall = recall,
                  .position = query,
                  .live = static_cast<std::uint32_t>(visible_),
                  .wanted = wanted.count[head],
                  .missed = wanted.count[head] - static_cast<std::uint32_t>(hits)});
    measure_.add_passages(head, rows.e(query, head / kHeadGroupSize) + head % kHeadGroupSize,
                          kHeadGroupSize, sum, visible());
  }
}

TierRows::TierRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : view_(view), rope_(rope), arithmetic_(arithmetic) {
  check_quantized_heads(view.head_size);
  view_.projection = nullptr;  // changes of log-likelihood are computed from the full cache's rows
}

std::vector<TierRow*> TierRows::rows(std::span<const TierSlots> tier_plan) {
  constexpr int kNoTier = -1;  // the token is not quantized yet
  std::vector<TierRow*> by_tier;
  for (std::size_t tier = 0; tier < tier_plan.size(); ++tier) {
    const auto path = demotion_path(tier_plan, kNoTier, static_cast<int>(tier));
    auto& row = rows_[path];
    if (!row && !path.empty()) row = quantize(path);
    by_tier.push_back(row.get());
  }
  return by_tier;
}

/// Quantizes all tokens to the formats of a demotion path, one after another.
std::unique_ptr<TierRow> TierRows::quantize(const std::vector<KvFormat>& path) const {
  const std::size_t dim = view_.head_size;
  std::vector<float> keys(view_.tokens * dim), values(keys.size());
  for (std::uint32_t token = 0; token < view_.tokens; ++token) {
    const std::span<float> key = std::span(keys).subspan(token * dim, dim),
                           value = std::span(values).subspan(token * dim, dim);
    rotate_original(rope_, arithmetic_, view_.key(token), view_.head_size, token, key.data());
    std::copy_n(view_.v + token * view_.kv_token_stride, dim, value.begin());
    quantize_token(path, key, value, RowState::plain);
  }
  return std::make_unique<TierRow>(
      TierRow{GroupRows(view_, rope_, arithmetic_, keys), std::move(values)});
}

void TierRows::compute(std::uint32_t first, std::uint32_t count) {
  for (const auto& [path, row] : rows_)
    if (row) row->rows.compute(first, count);
}

}  // namespace kvlab
