// Computes the attention of one query on the host in two ways: exactly (in float64), and as a plain
// kernel with the precision of our kernels would compute it. The errors of our kernels are compared
// with the error of the plain computation.
#pragma once

#include <cstddef>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "kernels/attention.hpp"

namespace kvlab::kernels {

/// The value after rounding to `type`.
float round_to(Type type, float value);
/// Converts to elements of `type` in memory; decode() converts back.
std::vector<std::byte> encode(Type type, std::span<const float> values);
std::vector<float> decode(Type type, std::span<const std::byte> bytes);

/// Standard normal values, rounded to `type`.
std::vector<float> random_values(Type type, std::size_t count, std::mt19937& random);

struct AttentionRow {
  std::vector<double> out;  // [dim]
  double lse;
};
inline constexpr float kNoSink = -std::numeric_limits<float>::infinity();
/// Attention in float64. `keys`, `values`: those that the query sees, [key, dim]. `sink`: a logit
/// that belongs to no key.
AttentionRow exact_row(std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink = kNoSink);
/// Attention with sums in float32, and with weights and output rounded to `type`.
AttentionRow naive_row(Type type, std::span<const float> query, std::span<const float> keys,
                       std::span<const float> values, float scale, float sink = kNoSink);

/// Sink logits of `heads` query heads, some far above all other logits, some far below, and some
/// -infinity. If `some` is false, no head has a sink.
std::vector<float> sample_sinks(std::size_t heads, bool some);

/// Compares the rows of a kernel with the exact and the naive ones.
class AttentionErrors {
 public:
  explicit AttentionErrors(Type type) : type_(type) {}
  void add(std::span<const float> out, float lse, const AttentionRow& exact,
           const AttentionRow& naive);
  /// Tolerates an additional error of each logit, beyond that of a plain kernel.
  void allow(double logit_error) { logit_error_ = logit_error; }
  /// Whether all results are finite, and no error is larger than twice the largest naive error plus
  /// one rounding of the result.
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
