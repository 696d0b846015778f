#include "engine/loop/float64_attention.hpp"

#include <algorithm>
#include <cmath>

namespace kvlab {

std::vector<double> Float64Attention::rotate(const float* x, std::uint32_t position) const {
  std::vector<double> y(x, x + head_size_);
  const std::size_t half = rope_.inv_freq.size();
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * static_cast<double>(rope_.inv_freq[i]);
    const double c = std::cos(angle) * rope_.factor, s = std::sin(angle) * rope_.factor;
    const double a = x[i], b = x[i + half];
    y[i] = a * c - b * s;
    y[i + half] = b * c + a * s;
  }
  return y;
}

std::vector<double> Float64Attention::probabilities(const std::vector<double>& query,
                                                    std::span<const std::vector<double>> keys,
                                                    const float* sink) const {
  std::vector<double> p;
  for (const std::vector<double>& key : keys) {
    double logit = 0;
    for (std::uint32_t d = 0; d < head_size_; ++d) logit += query[d] * key[d];
    p.push_back(logit * scale_);
  }
  double largest = *std::max_element(p.begin(), p.end());
  if (sink) largest = std::max(largest, double{*sink});
  double sum = sink ? std::exp(*sink - largest) : 0;
  for (double& x : p) sum += x = std::exp(x - largest);
  for (double& x : p) x /= sum;
  return p;
}

}  // namespace kvlab
