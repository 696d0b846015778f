#include "sim/error_projection.hpp"

#include <numeric>

namespace kvlab {
ProjectionColumns projection_columns(const TraceReader& trace, Queries queries) {
  return {trace.has_residuals() ? kResidualColumns : 0, trace.gradient_samples(queries)};
}

std::vector<float> gradients_of(const TraceReader& trace, std::uint32_t layer,
                                std::uint32_t kv_head, std::span<const std::uint32_t> queries) {
  const std::size_t group = trace.shape().group(), dim = trace.shape().head_size,
                    gradient_samples = trace.gradient_samples();
  std::vector<float> gradients(queries.size() * gradient_samples * group * dim);
  for (std::uint32_t gradient_sample = 0; gradient_sample < gradient_samples; ++gradient_sample)
    for (std::uint32_t head = 0; head < group; ++head)
      trace.gradient(layer, kv_head * trace.shape().group() + head, gradient_sample, queries,
                     gradients.data() + (gradient_sample * group + head) * dim,
                     gradient_samples * group * dim);
  return gradients;
}

ErrorProjection::ErrorProjection(const TraceReader& trace, std::uint32_t layer,
                                 std::uint32_t kv_head, Queries queries)
    : trace_(trace),
      layer_(layer),
      kv_head_(kv_head),
      columns_(projection_columns(trace, queries)) {
  if (columns_.residual) sketch_ = trace.sketch(layer, kv_head, kResidualColumns);
}

void ErrorProjection::add_residual(std::uint32_t head, const float* full, const float* kept,
                                   float factor, float* to) const {
  if (!columns_.residual) return;
  const std::uint32_t dim = trace_.shape().head_size;
  const float* map = sketch_.data() + std::size_t{head} * dim * kResidualColumns;
  float sums[kResidualColumns] = {};
  for (std::uint32_t d = 0; d < dim; ++d, map += kResidualColumns) {
    const float difference = full[d] - factor * kept[d];
    for (std::uint32_t c = 0; c < kResidualColumns; ++c) sums[c] += difference * map[c];
  }
  for (const float sum : sums) *to++ += sum;
}

std::vector<float> ErrorProjection::gradients(std::uint32_t first, std::uint32_t count) const {
  std::vector<std::uint32_t> queries(count);
  std::iota(queries.begin(), queries.end(), first);
  return gradients_of(trace_, layer_, kv_head_, queries);
}

}  // namespace kvlab
