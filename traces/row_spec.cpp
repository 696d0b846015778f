#include "traces/row_spec.hpp"

#include <algorithm>
#include <cmath>

#include "traces/base/numeric/softmax.hpp"

namespace kvlab {

void make_scores(float* products, std::size_t count, float scale, float softcap) {
  kvlab::scale(products, count, scale);
  if (softcap == 0) return;
  // Computed in float64 and then rounded to float32, so that every libm gives the same result.
  const double cap = softcap;
  for (float& score : std::span(products, count))
    score = static_cast<float>(cap * std::tanh(score / cap));
}

RowSum row_exponentials(const float* scores, std::size_t count, const float* sink, float* e) {
  if (!sink) {
    const std::int32_t shift = shared_exponentials(scores, count, e);
    return {lane_sum(e, count), 0, shift};
  }
  std::vector<float> all(scores, scores + count);
  all.push_back(*sink);
  const std::int32_t shift = shared_exponentials(all.data(), all.size(), all.data());
  std::copy_n(all.begin(), count, e);
  return {lane_sum(e, count) + all.back(), all.back(), shift};
}

}  // namespace kvlab
