#include "sim/config_batches/feedback/feedback_config_batch.hpp"

#include <algorithm>

namespace kvlab {
FeedbackConfigBatch::FeedbackConfigBatch(BatchedConfigs configs, LiveSet::Identity identity,
                                         const HeadView& view, const MeasuredQueries* measured,
                                         std::unique_ptr<CachePositionTable> positions_in_cache,
                                         std::unique_ptr<GroupRows> unrounded,
                                         std::unique_ptr<TierRows> quantized,
                                         std::unique_ptr<FutureMasses> oracle)
    : measured_(measured),
      unrounded_(std::move(unrounded)),
      positions_in_cache_(std::move(positions_in_cache)),
      quantized_(std::move(quantized)),
      oracle_(std::move(oracle)),
      observes_(oracle_ != nullptr) {
  for (const ResolvedConfig* config : configs) {
    identity.seed = config->seed;
    runs_.push_back(std::make_unique<FeedbackRun>(*config, identity, view, measured,
                                                  quantized_.get(), oracle_.get()));
    observes_ |= runs_.back()->cache().needs() != Needs::nothing;
  }
}

FeedbackConfigBatch::~FeedbackConfigBatch() = default;

bool FeedbackConfigBatch::wants_row(std::uint32_t query) const {
  return observes_ || (measured_ && measured_->contains(query));
}

/// Computes, for the next queries, the rows that only this batch needs: rows of unrounded logits,
/// and rows of quantized tiers.
void FeedbackConfigBatch::prepare(std::uint32_t first, std::uint32_t count) {
  bool wanted = observes_;
  for (std::uint32_t query = first; query < first + count; ++query) wanted |= wants_row(query);
  if (unrounded_ && wanted) {
    std::uint32_t from = first;  // the first token whose exponential a run reads
    for (const auto& run : runs_) from = std::min(from, run->first_shared());
    unrounded_->compute(first, count, from);
  }
  if (quantized_ && wanted) quantized_->compute(first, count);
}

void FeedbackConfigBatch::step(std::size_t config, std::uint32_t query, GroupRows& rows) {
  runs_[config]->attend(query, rows, unrounded_ ? unrounded_.get() : &rows,
                        positions_in_cache_.get(), scratch_);
  if (watcher_) watcher_(config, query, runs_[config]->visible());
}

void FeedbackConfigBatch::attend(std::uint32_t first, std::uint32_t count, GroupRows& rows) {
  prepare(first, count);
  // With cache positions, each configuration has its own rotated keys, which are larger than a row.
  // So the outer loop goes over configurations, and the keys of one configuration stay in the CPU
  // cache for all queries. Otherwise the outer loop goes over queries, and a row stays in the CPU
  // cache while all configurations read it.
  if (positions_in_cache_) {
    for (std::size_t c = 0; c < runs_.size(); ++c)
      for (std::uint32_t query = first; query < first + count; ++query) step(c, query, rows);
  } else {
    for (std::uint32_t query = first; query < first + count; ++query) {
      for (std::size_t c = 0; c < runs_.size(); ++c) step(c, query, rows);
      if (oracle_) oracle_->spend(query, rows);
    }
  }
}

void FeedbackConfigBatch::attend_together(
    std::span<const std::unique_ptr<FeedbackConfigBatch>> heads, std::uint32_t first,
    std::uint32_t count, std::span<GroupRows> rows) {
  for (const auto& head : heads) head->prepare(first, count);
  for (std::uint32_t query = first; query < first + count; ++query)
    for (std::size_t c = 0; c < heads.front()->runs_.size(); ++c)
      for (std::size_t h = 0; h < heads.size(); ++h) heads[h]->step(c, query, rows[h]);
}

std::vector<HeadOutcome> FeedbackConfigBatch::outcomes() {
  std::vector<HeadOutcome> all;
  for (const auto& run : runs_) all.push_back(run->outcome());
  return all;
}

}  // namespace kvlab
