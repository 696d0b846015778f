// The row-wise operations of a transformer layer. Each computes in a fixed order, so the bits of a
// row depend on that row alone.
#pragma once

#include <cstddef>

namespace kvlab {

/// y[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i]. Squares are summed in float64, in sixteen
/// running sums (index modulo 16). In place (y == x) is allowed.
void rms_norm(const float* x, const float* weight, std::size_t size, float epsilon, float* y);

/// gate[i] = silu(gate[i]) * up[i], with silu(g) = g / (1 + exp(-g)).
void silu_times(float* gate, const float* up, std::size_t count);
/// gate[i] = gelu(gate[i]) * up[i], with gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715
/// g^3))).
void gelu_times(float* gate, const float* up, std::size_t count);

/// y[i] += x[i].
void add(const float* x, std::size_t count, float* y);

}  // namespace kvlab
