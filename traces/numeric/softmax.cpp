#include "traces/numeric/softmax.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "traces/numeric/vector.hpp"

namespace kvlab {
namespace {

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
// ln 2 in two parts, the first with few enough bits that its product with |i| < 2^13 is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;

inline __attribute__((always_inline)) Float16 exponentials(Float16 s, std::int32_t shift) {
  const Float16 rounded = s * kLog2E + kRounder;
  const Float16 whole = rounded - kRounder;
  const Float16 r = (s - whole * kLn2High) - whole * kLn2Low;
  // Cephes' expf polynomial on [-ln 2 / 2, ln 2 / 2].
  Float16 poly = r * 1.9875691500e-4f + 1.3981999507e-3f;
  poly = poly * r + 8.3334519073e-3f;
  poly = poly * r + 4.1665795894e-2f;
  poly = poly * r + 1.6666665459e-1f;
  poly = poly * r + 5.0000001201e-1f;
  poly = poly * (r * r) + r + 1.0f;
  Int16 bits;
  std::memcpy(&bits, &rounded, sizeof bits);
  std::int32_t zero_bits;
  std::memcpy(&zero_bits, &kRounder, sizeof zero_bits);
  const Int16 exponent = bits - zero_bits - shift;  // <= 0
  const Int16 power = (exponent + 127) << 23;
  Float16 two;
  std::memcpy(&two, &power, sizeof two);
  const Float16 e = poly * two;
  const Int16 kept = exponent >= -126;
  Int16 result;
  std::memcpy(&result, &e, sizeof result);
  result &= kept;
  Float16 out;
  std::memcpy(&out, &result, sizeof out);
  return out;
}

KVLAB_HOT void exponentials_of(const float* s, std::size_t count, std::int32_t shift, float* e) {
  std::size_t i = 0;
  Float16 v;
  for (; i + kLanes <= count; i += kLanes) {
    std::memcpy(&v, s + i, sizeof v);
    v = exponentials(v, shift);
    std::memcpy(e + i, &v, sizeof v);
  }
  if (i < count) {
    float rest[kLanes] = {};
    std::memcpy(rest, s + i, (count - i) * sizeof(float));
    std::memcpy(&v, rest, sizeof v);
    v = exponentials(v, shift);
    std::memcpy(rest, &v, sizeof v);
    std::memcpy(e + i, rest, (count - i) * sizeof(float));
  }
}

KVLAB_HOT float largest(const float* s, std::size_t count) {
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, -std::numeric_limits<float>::infinity());
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] = s[i + l] > lanes[l] ? s[i + l] : lanes[l];
  for (; i < count; ++i) lanes[0] = std::max(lanes[0], s[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

KVLAB_HOT float sum_of(const float* e, std::size_t count) {
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (std::size_t l = 0; l < kLanes; ++l) lanes[l] += e[i + l];
  for (std::size_t l = 0; i < count; ++i, ++l) lanes[l] += e[i];
  for (std::size_t width = kLanes / 2; width > 0; width /= 2)
    for (std::size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  return lanes[0];
}

KVLAB_HOT void divide_by(const float* e, std::size_t count, float sum, float* p) {
  for (std::size_t i = 0; i < count; ++i) p[i] = e[i] / sum;
}

KVLAB_HOT void scale_by(float* s, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; ++i) s[i] *= factor;
}

}  // namespace

std::int32_t shared_exponentials(const float* s, std::size_t count, float* e) {
  const float rounded = largest(s, count) * kLog2E + kRounder;
  const auto shift = static_cast<std::int32_t>(rounded - kRounder);
  exponentials_of(s, count, shift, e);
  return shift;
}

float lane_sum(const float* e, std::size_t count) { return sum_of(e, count); }
void divide(const float* e, std::size_t count, float sum, float* p) { divide_by(e, count, sum, p); }
void scale(float* s, std::size_t count, float factor) { scale_by(s, count, factor); }

double log_sum_exp(std::int32_t shift, double sum) {
  return static_cast<double>(shift) * 0.69314718055994530942 + std::log(sum);
}

}  // namespace kvlab
