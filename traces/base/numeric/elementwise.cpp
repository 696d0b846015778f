#include "traces/base/numeric/elementwise.hpp"

#include <cmath>

#include "traces/base/numeric/hot_loops.hpp"

namespace kvlab {

void rms_norm(const float* x, const float* weight, std::size_t size, float epsilon, float* y) {
  const HotLoops& loops = hot_loops();
  const double mean = loops.lane_sum_of_squares(x, size) / static_cast<double>(size);
  const double scale = 1.0 / std::sqrt(mean + static_cast<double>(epsilon));
  loops.scale_by(x, weight, size, static_cast<float>(scale), y);
}

void silu_times(float* gate, const float* up, std::size_t count) {
  hot_loops().silu_times(gate, up, count);
}

void gelu_times(float* gate, const float* up, std::size_t count) {
  hot_loops().gelu_times(gate, up, count);
}

void add(const float* x, std::size_t count, float* y) { hot_loops().add(x, count, y); }

}  // namespace kvlab
