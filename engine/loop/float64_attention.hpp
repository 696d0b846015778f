// Attention in float64, plainly: what observations are checked against.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "policies/policy.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

class Float64Attention {
 public:
  Float64Attention(const Rope& rope, std::uint32_t head_size, double softmax_scale)
      : rope_(rope), head_size_(head_size), scale_(softmax_scale) {}

  /// q or k rotated to `position`, [dim].
  std::vector<double> rotate(const float* x, std::uint32_t position) const;

  /// Probabilities of one query over keys [count]; `keys[i]` and `query` are rotated already.
  /// `sink`: the logit that takes what no token gets, or null.
  std::vector<double> probabilities(const std::vector<double>& query,
                                    std::span<const std::vector<double>> keys,
                                    const float* sink = nullptr) const;

 private:
  Rope rope_;
  std::uint32_t head_size_;
  double scale_;
};

}  // namespace kvlab
