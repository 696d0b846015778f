// Softmax whose exponentials can be shared by several sets of live tokens.
//
// The exponentials are e_j = exp(s_j) * 2^-shift with an integer shift. The argument is reduced
// before the shift is applied, so a different shift scales every e_j by an exact power of two, and
// e_j / sum has the same bits. A replay computes the exponentials of a row once and masks them for
// each policy. A decoder holds only the live tokens and computes only their exponentials. Both get
// equal probabilities.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvlab {

/// e[i] = exp(s[i]) * 2^-shift, accurate to about 1 ulp. Returns shift = round(max(s) / ln 2).
/// Entries below 2^-126 become 0. The largest e lies in [0.70, 1.42]. In place (e == s) is allowed.
std::int32_t shared_exponentials(const float* s, std::size_t count, float* e);

/// The sum of sixteen running sums, index modulo 16. Exponentials are always added in this order.
float lane_sum(const float* e, std::size_t count);

/// p[i] = e[i] / sum. In place is allowed.
void divide(const float* e, std::size_t count, float sum, float* p);

/// s[i] *= scale.
void scale(float* s, std::size_t count, float factor);

/// The natural logarithm of the sum of exp(s), from the shift and the sum of the shifted
/// exponentials.
double log_sum_exp(std::int32_t shift, double sum);

/// If a sum is below this, the exponentials were shifted for a row with much larger scores and have
/// lost bits. Recompute them with the shift of the live tokens' scores.
inline constexpr float kSharedSumFloor = 0x1p-60f;

}  // namespace kvlab
