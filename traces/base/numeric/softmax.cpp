#include "traces/base/numeric/softmax.hpp"

#include <cmath>

#include "traces/base/numeric/hot_loops.hpp"

namespace kvlab {

std::int32_t shared_exponentials(const float* s, std::size_t count, float* e) {
  constexpr float kLog2E = 1.44269504088896341f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const HotLoops& loops = hot_loops();
  const float rounded = loops.largest(s, count) * kLog2E + kRounder;
  // The clamp gives damaged logits a shift too: a number outside an integer's range has none.
  const auto shift =
      static_cast<std::int32_t>(std::fmax(std::fmin(rounded - kRounder, 0x1p23f), -0x1p23f));
  loops.exponentials(s, count, shift, e);
  return shift;
}

float lane_sum(const float* e, std::size_t count) { return hot_loops().lane_sum(e, count); }

void divide(const float* e, std::size_t count, float sum, float* p) {
  hot_loops().divide(e, count, sum, p);
}

void scale(float* s, std::size_t count, float factor) { hot_loops().scale(s, count, factor); }

double log_sum_exp(std::int32_t shift, double sum) {
  return static_cast<double>(shift) * 0.69314718055994530942 + std::log(sum);
}

}  // namespace kvlab
