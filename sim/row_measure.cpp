#include "sim/row_measure.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace kvlab {
namespace {

/// The initial values: 0 for sums, 1 for products.
constexpr SumTerms no_terms() {
  SumTerms terms{};
  for (std::size_t i = 0; i < kQuerySums; ++i) terms.of[i] = is_log_sum(i) ? 1 : 0;
  return terms;
}

}  // namespace

RowMeasure::RowMeasure(const MeasuredQueries* measured, std::size_t sets, const HeadView& view,
                       std::uint32_t together)
    : measured_(measured),
      projection_(view.projection),
      group_(view.group),
      together_(together),
      stats_(sets) {
  if (!measured) return;
  shape_ = measured->sums(view.group);
  for (HeadStats& stats : stats_) stats.resize(*measured, view.group, view.projection_columns());
  sums_.resize(sets * group_, no_terms());
  width_ = std::min<std::size_t>(16, sums_.size());
  tiles_ = (sums_.size() + width_ - 1) / width_;
  rows_.resize(together * tiles_ * width_);
  recalls_.reset(new float[tiles_ * measured->size() * width_]);
}

void RowMeasure::begin_query(std::uint32_t query) {
  const std::uint32_t block = measured_->block(query);
  if (block != block_ || pending_ == together_) flush();
  query_ = query;
  block_ = block;
  newest_ = rows_.data() + pending_++ * tiles_ * width_;
}

void RowMeasure::add_passages(std::uint32_t head, const float* e, std::size_t stride, double sum,
                              std::span<const std::uint32_t> tokens) {
  for (std::size_t s = 0; s < measured_->passages().size(); ++s) {
    const Passage& named = measured_->passages()[s];
    const std::uint32_t end = named.start + named.tokens;
    if (end > query_) continue;
    double all = 0, kept = 0;
    for (std::uint32_t token = named.start; token < end; ++token) all += e[token * stride];
    for (auto token = std::ranges::lower_bound(tokens, named.start);
         token != tokens.end() && *token < end; ++token)
      kept += e[*token * stride];
    this->sum(0, kept_of(s), head) += kept / sum;
    this->sum(0, all_of(s), head) += all / sum;
  }
}

void RowMeasure::add_selection(std::uint32_t head, const SelectionCounts& counts) {
  sum(0, Sum::fetched, head) += counts.fetched;
  sum(0, Sum::selected, head) += counts.selected;
  if (!counts.agreed) return;
  sum(0, Sum::agreed, head) += *counts.agreed;
  sum(0, Sum::compared, head) += counts.selected;
}

void RowMeasure::add_output(std::size_t set, std::uint32_t head, double error, double size,
                            const float* full, const float* kept, float factor) {
  HeadStats& stats = stats_[set];
  const std::uint32_t sample = measured_->sample(query_);
  stats.errors[2 * sample] += error;
  stats.errors[2 * sample + 1] += size;
  if (size > 0) sum(set, Sum::error, head) += std::sqrt(error / size);
  sum(set, size > 0 ? Sum::errors : Sum::zeros, head) += 1;
  if (kept && projection_)
    projection_->add_residual(head, full, kept, factor, stats.residual_of(sample));
}

/// Adds the data of the pending queries to the sums of their block.
void RowMeasure::flush() {
  for (std::size_t at = 0; pending_ > 0 && at < sums_.size(); ++at) {
    const SumTerms terms = std::exchange(sums_[at], no_terms());
    for (std::size_t i = 0; i < kQuerySums; ++i)
      sum(at / group_, Sum{i}, static_cast<std::uint32_t>(at % group_)) +=
          is_log_sum(i) ? -std::log(terms.of[i]) : terms.of[i];
  }
  const std::size_t first = pending_ > 0 ? measured_->index(query_) + 1 - pending_ : 0;
  for (std::size_t tile = 0; tile < tiles_; ++tile)
    for (std::size_t i = 0; i < pending_; ++i)
      std::copy_n(rows_.data() + (i * tiles_ + tile) * width_, width_,
                  recalls_.get() + (tile * measured_->size() + first + i) * width_);
  pending_ = 0;
}

std::vector<HeadStats> RowMeasure::take() {
  if (!measured_) return std::move(stats_);
  flush();
  const std::size_t size = measured_->size(), stride = size + width_;
  std::vector<float> turned(width_ * stride);
  for (std::size_t first = 0; first < sums_.size(); first += width_) {
    const float* const tile = recalls_.get() + first * size;
    for (std::size_t i = 0; i < size; ++i)
      for (std::size_t c = 0; c < width_; ++c) turned[c * stride + i] = tile[i * width_ + c];
    for (std::size_t at = first; at < std::min(first + width_, sums_.size()); ++at)
      stats_[at / group_].quantiles[at % group_] =
          quantile_of(*measured_, turned.data() + (at - first) * stride);
  }
  return std::move(stats_);
}

}  // namespace kvlab
