// Attention of one query on the host: exactly (float64), and as a plain kernel of the same
// precision would have it. The error of the second is the measure for that of ours.
#pragma once

#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/attention.hpp"

namespace kvlab::kernels {

/// The value after rounding to `type`.
float rounded(Type type, float value);
/// Elements of `type` in memory, and back.
std::vector<std::byte> encode(Type type, std::span<const float> values);
std::vector<float> decode(Type type, std::span<const std::byte> bytes);

/// Standard normal values, rounded to `type`.
std::vector<float> random_values(Type type, std::size_t count, std::mt19937& random);

struct AttentionRow {
  std::vector<double> out;  // [dim]
  double lse;
};
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();
/// `keys`, `values`: the visible ones, [key, dim]. `sink`: a logit that none of them has.
AttentionRow exact_row(std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink = kNoSink);
/// Float32 sums; weights and output rounded to `type`.
AttentionRow naive_row(Type type, std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink = kNoSink);

/// Sink logits of so many query heads: some far above all others, some far below; none unless
/// `some`.
std::vector<float> sample_sinks(std::size_t heads, bool some);

/// Collects rows of a kernel beside exact and naive ones.
class AttentionErrors {
 public:
  explicit AttentionErrors(Type type) : type_(type) {}
  void add(std::span<const float> out, float lse, const AttentionRow& exact,
           const AttentionRow& naive);
  /// Accepts that much more in any logit than a plain kernel would have.
  void allow(double logit_error) { logit_error_ = logit_error; }
  /// Every error is finite and at most twice the largest naive one, or a rounding of the result.
  bool good() const;
  double out() const { return out_; }
  double naive_out() const { return naive_out_; }
  double lse() const { return lse_; }

 private:
  Type type_;
  double out_ = 0, naive_out_ = 0, largest_out_ = 0;
  double lse_ = 0, naive_lse_ = 0, largest_lse_ = 1;
  double logit_error_ = 0;
  bool finite_ = true;
};

}  // namespace kvlab::kernels
