#include "sim/plain_run.hpp"

#include <algorithm>

#include "traces/base/cancel.hpp"

namespace kvlab {
namespace {

HeadShape shape_of(const HeadView& view, Positions positions, const HeadArithmetic& arithmetic) {
  HeadShape shape{.head_size = view.head_size,
                  .group = view.group,
                  .positions = positions,
                  .softmax_scale = arithmetic.softmax_scale,
                  .threshold16 = arithmetic.threshold16,
                  .window = arithmetic.window,
                  .softcap = arithmetic.softcap};
  if (view.sinks) shape.sinks.assign(view.sinks, view.sinks + view.group);
  if (positions == Positions::original) shape.rounding = arithmetic.rounding;
  return shape;
}

/// The features that the live set reads and for which the view has values.
FeaturesByName features_of(const HeadView& view, const LiveSet& live) {
  FeaturesByName features;
  for (const std::string& name : live.features())
    if (view.feature_values && view.feature_values->contains(name))
      features[name] = view.feature_values->at(name);
  return features;
}

HostCache cache_of(const HeadShape& shape, LiveSet live, const HeadView& view) {
  FeaturesByName features = features_of(view, live);
  return HostCache(shape, std::move(live), view.output, std::move(features));
}

}  // namespace

PlainRun::PlainRun(LiveSet live, Positions positions, const std::vector<Append>& appends,
                   const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic)
    : appends_(appends),
      view_(view),
      rope_(rope),
      masks_rows_(positions == Positions::original),
      cache_(cache_of(shape_of(view, positions, arithmetic), std::move(live), view)),
      measure_(nullptr, view) {}

bool PlainRun::wants(std::uint32_t query) const {
  if (measure_.measures(query)) return true;
  if (live().needs() == Needs::nothing) return false;
  return needs_requests(live().needs()) || age_of(query) < live().tail();
}

bool PlainRun::wants_row(std::uint32_t query) const {
  // It is not known yet which queries of a later append the policy will observe. So this returns
  // true for all queries; a row that is not needed does no harm.
  return measure_.measures(query) || (masks_rows_ && live().needs() != Needs::nothing);
}

HeadAppend PlainRun::head_append() const {
  const Append& append = current_append();
  return {.first = append.first,
          .tokens = append.tokens,
          .q = view_.query(0, append.first),
          .query_head_stride = view_.q_head_stride,
          .query_stride = view_.q_token_stride,
          .k = view_.key(append.first),
          .v = view_.v + append.first * view_.kv_token_stride,
          .key_stride = view_.kv_token_stride};
}

void PlainRun::attend(QueryRange queries, SharedRows& rows) {
  const Append& append = current_append();
  if (queries.begin == append.first) {
    if (append_watcher_) append_watcher_(append.first, live());
    cache_.begin_step(head_append(), rope_);
  }
  QueryRange wanted = queries;
  while (wanted.begin < wanted.end && !wants(wanted.begin)) ++wanted.begin;
  while (wanted.begin < wanted.end && !wants(wanted.end - 1)) --wanted.end;
  const auto measure = [&](std::uint32_t query, std::uint32_t head, std::span<const float> p) {
    if (measure_.measures(query)) measure_head(query, head, p, rows);
  };
  if (wanted.begin < wanted.end)
    cache_.attend(head_append(), wanted.begin - append.first, wanted.end - append.first, rope_,
                  {.shared = &rows, .visit = measure});
  for (std::uint32_t query = queries.begin; watcher_ && query < queries.end; ++query)
    watcher_(query, live().positions().first(live().size() - age_of(query)));
  if (queries.end < append_end()) return;
  cache_.end_step();
  if (append.ends_prompt) cache_.end_prompt();
  ++next_;
}

void PlainRun::measure_head(std::uint32_t query, std::uint32_t head, std::span<const float> p,
                            SharedRows& rows) {
  const auto tokens = live().positions().first(p.size());
  const std::span<const float> out =
      measure_.add_row(query, head, tokens, rows, [&](float* to) { cache_.accumulate(p, to); });
  if (measure_.wants_quantization(query) && !cache_.all_exact(p.size()))
    measure_quantization(query, head, tokens, out, rows);
}

/// Computes the output that the same tokens give in 16 bit, and measures the difference between
/// `out` and this output.
void PlainRun::measure_quantization(std::uint32_t query, std::uint32_t head,
                                    std::span<const std::uint32_t> live, std::span<const float> out,
                                    SharedRows& rows) {
  exact_p_.resize(live.size());
  rows.probabilities(query, head, live, exact_p_.data());
  exact_out_.assign(view_.head_size, 0.0f);
  accumulate_rows(exact_p_, live, view_.v, view_.kv_token_stride, view_.head_size,
                  exact_out_.data());
  measure_.add_quantization(0, head, exact_out_.data(), out.data(), 1.0f);
}

namespace {

bool anybody_wants(QueryRange queries, const LayerRun& run) {
  for (std::uint32_t query = queries.begin; query < queries.end; ++query)
    for (const auto& head : run)
      if (head->wants_row(query)) return true;
  return false;
}

void attend(QueryRange queries, std::span<SharedRows> rows, const LayerRun& run) {
  for (std::uint32_t first = queries.begin; first < queries.end;) {
    const std::uint32_t end = std::min(queries.end, run.front()->append_end());
    for (std::size_t head = 0; head < rows.size(); ++head)
      run[head]->attend({first, end}, rows[head]);
    first = end;
  }
}

}  // namespace

void run_layer(QueryRange queries, std::span<SharedRows> rows, std::span<const LayerRun> runs) {
  for (const LayerRun& run : runs) {
    std::vector<AgedSet*> caches;
    for (const auto& head : run) caches.push_back(&head->aged_set());
    share_ranks(caches);
  }
  const std::uint32_t block = rows.front().block_queries();
  for (std::uint32_t first = queries.begin; first < queries.end; first += block) {
    const QueryRange now{first, std::min(first + block, queries.end)};
    throw_if_cancelled();
    if (std::ranges::any_of(runs, [&](const LayerRun& run) { return anybody_wants(now, run); }))
      for (SharedRows& head : rows) head.compute(now.begin, now.end - now.begin);
    for (const LayerRun& run : runs) attend(now, rows, run);
  }
}

}  // namespace kvlab
