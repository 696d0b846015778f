// Plain attention in float64 over the tokens that one KV head keeps. `kvlab verify` compares
// engines with it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "policies/aged_set.hpp"
#include "policies/cache_config.hpp"
#include "sim/cache/growing_rope.hpp"
#include "traces/base/numeric/dtype.hpp"
#include "traces/row_spec.hpp"

namespace kvlab {

/// Rounds each value to `dtype`.
void round_all(Dtype dtype, std::span<float> values);
void round_all(Dtype dtype, std::span<double> values);

/// Keys after RoPE, and values, of the live tokens, oldest first.
struct AttendedRows {
  std::size_t dim = 0;
  std::vector<double> keys, values;  // [age, dim]

  AttendedRows round_values(Dtype dtype) const;
};

/// The attention of one query of one query head.
struct AttentionRow {
  std::vector<double> p;    // [visible token]
  std::vector<double> out;  // [dim]
  /// The sum of p |value| over the tokens, for the channel in which it is largest. Errors of `out`
  /// are relative to it.
  double scale = 0;
};

/// The attention of one layer.
class Float64Attention {
 public:
  Float64Attention(const RowSpec& row, std::uint32_t head_size, Positions positions);

  std::uint32_t head_size() const { return head_size_; }
  Positions positions() const { return positions_; }
  /// Rotates a query or key `x` to `position`; writes `to` [dim].
  void rotate(const float* x, std::uint32_t position, double* to) const;
  /// The rotated query at `position`, which is the age-th live token.
  std::vector<double> query(const float* x, std::uint32_t position, std::uint32_t age) const;

  /// Attention of a rotated query over the tokens of ages [first, end). `sink`: the sink logit, or
  /// null. `rounding`: the dtype to which weights and outputs are rounded, as in a plain kernel of
  /// that dtype.
  AttentionRow row(std::span<const double> query, const AttendedRows& rows, std::size_t first,
                   std::size_t end, const float* sink,
                   std::optional<Dtype> rounding = std::nullopt) const;
  /// The age of the oldest token that the query at `position` sees.
  std::size_t first_visible(const LiveSet& live, std::uint32_t position) const;

 private:
  Rope rope_;
  std::uint32_t head_size_, window_;
  double scale_, softcap_;
  Positions positions_;
};

/// All queries, keys and values of one KV head, before RoPE.
class HeadTokens {
 public:
  /// `attention` and `rope` belong to the layer, and must outlive this object.
  HeadTokens(const Float64Attention& attention, GrowingRope& rope, std::uint32_t group)
      : attention_(attention), rope_(rope), group_(group) {}

  /// A layer's tensors [token, head, dim] of `tokens` consecutive tokens.
  struct Tensors {
    std::span<const float> q, k, v;
    std::size_t tokens;
  };
  /// Appends the part that belongs to KV head `kv_head`.
  void append(const Tensors& layer, std::uint32_t kv_head);

  const float* query(std::size_t position, std::size_t head) const {
    return q.data() + (position * group_ + head) * attention_.head_size();
  }
  /// Keys and values as the head stores them while the queries of `append` attend. `rounding`: the
  /// dtype to which keys are rounded before they are quantized. Several threads may call this at
  /// the same time once the layer's rope covers the append.
  AttendedRows attend(const LiveSet& live, const Append& append,
                      std::optional<Dtype> rounding) const;

  std::vector<float> q, k, v;  // [token, group, dim], [token, dim]

 private:
  void quantize(const LiveSet& live, std::size_t age, std::optional<Dtype> rounding, double* key,
                double* value) const;

  const Float64Attention& attention_;
  GrowingRope& rope_;
  std::uint32_t group_;
  std::vector<double> rotated_;  // [token, dim]: keys at their original positions
};

}  // namespace kvlab
