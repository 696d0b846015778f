#include "sim/error_projection.hpp"

#include <algorithm>

#include "sim/metrics.hpp"

namespace kvlab {
namespace {

/// sums [kColumns] += map^T (full - factor * kept); map [dim, kColumns].
template <std::uint32_t kColumns>
void add_product(const float* full, const float* kept, float factor, std::uint32_t dim,
                 const float* map, float* sums) {
  for (std::uint32_t d = 0; d < dim; ++d, map += kColumns) {
    const float difference = full[d] - factor * kept[d];
    for (std::uint32_t c = 0; c < kColumns; ++c) sums[c] += difference * map[c];
  }
}

}  // namespace

ProjectionColumns projection_columns(const TraceReader& trace, Span span) {
  return {trace.has_residuals() ? kResidualColumns : 0, trace.draws(span)};
}

std::vector<float> sampled_gradients(const TraceReader& trace, std::uint32_t layer,
                                     std::uint32_t kv_head, const QuerySpan& span) {
  const std::size_t group = trace.shape().group(), dim = trace.shape().head_size,
                    draws = trace.draws(span.span());
  const std::vector<std::uint32_t> queries = span.sampled_queries();
  std::vector<float> gradients(queries.size() * draws * group * dim);
  for (std::uint32_t draw = 0; draw < draws; ++draw)
    for (std::uint32_t head = 0; head < group; ++head)
      trace.gradient(layer, kv_head * trace.shape().group() + head, draw, queries,
                     gradients.data() + (draw * group + head) * dim, draws * group * dim);
  return gradients;
}

ErrorProjection::ErrorProjection(const TraceReader& trace, std::uint32_t layer,
                                 std::uint32_t kv_head, const QuerySpan& span)
    : columns_(projection_columns(trace, span.span())),
      group_(trace.shape().group()),
      head_size_(trace.shape().head_size) {
  if (columns_.residual) sketch_ = trace.sketch(layer, kv_head, kResidualColumns);
  const std::vector<float> rows = sampled_gradients(trace, layer, kv_head, span);
  gradients_.resize(std::size_t{span.samples()} * group_ * fours() * head_size_ * kDraws);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t d = i % head_size_, head = i / head_size_ % group_,
                      draw = i / head_size_ / group_ % columns_.draws,
                      sample = i / head_size_ / group_ / columns_.draws;
    const std::size_t four = (sample * group_ + head) * fours() + draw / kDraws;
    gradients_[(four * head_size_ + d) * kDraws + draw % kDraws] = rows[i];
  }
}

void ErrorProjection::add(std::uint32_t sample, std::uint32_t head, const float* full,
                          const float* kept, float factor, float* to) const {
  if (columns_.residual) {
    float sums[kResidualColumns] = {};
    add_product<kResidualColumns>(
        full, kept, factor, head_size_,
        sketch_.data() + std::size_t{head} * head_size_ * kResidualColumns, sums);
    for (const float sum : sums) *to++ += sum;
  }
  for (std::uint32_t four = 0; four < fours(); ++four) {
    float sums[kDraws] = {};
    const std::size_t at = (std::size_t{sample} * group_ + head) * fours() + four;
    add_product<kDraws>(full, kept, factor, head_size_,
                        gradients_.data() + at * head_size_ * kDraws, sums);
    for (std::uint32_t c = 0; c < kDraws && four * kDraws + c < columns_.draws; ++c)
      *to++ += sums[c];
  }
}

}  // namespace kvlab
