#include "traces/base/numeric/softmax.hpp"

#include <cmath>

#include "traces/base/numeric/exponential.hpp"
#include "traces/base/numeric/hot_loops.hpp"

namespace kvlab {

std::int32_t shared_exponentials(const float* s, std::size_t count, float* e) {
  const HotLoops& loops = hot_loops();
  const std::int32_t shift = shift_below(loops.largest(s, count));
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
