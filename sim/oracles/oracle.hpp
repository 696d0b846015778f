// The oracles of the replay. They use knowledge of the future, so they are not policies and cannot
// be deployed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policies/ops/ops.hpp"
#include "sim/metrics.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

/// Chooses the tokens to evict from one KV head with knowledge of the future.
class Oracle {
 public:
  virtual ~Oracle() = default;
  /// Writes the rank of each live token before the token `step.now` is appended. The token with the
  /// lowest rank is evicted first. positions and ranks are [count], by age.
  virtual void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                    std::uint64_t* ranks) = 0;
};

/// The hooks of a live set whose eviction order comes from an oracle. The oracle must outlive the
/// live set.
PolicyOps oracle_ops();
std::vector<std::byte> oracle_params(Oracle& oracle);

/// `oracle_attention`: the rank of a token is the probability mass that future queries of the full
/// cache give it.
class AttentionOracle final : public Oracle {
 public:
  AttentionOracle(const HeadView& view, SharedRows rows);
  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;

 private:
  void add(std::uint32_t first, std::uint32_t end, std::vector<std::uint64_t>& masses);

  std::uint32_t group_, spent_ = 0;  // number of queries whose masses are in given_
  SharedRows rows_;
  std::vector<std::uint64_t> all_, given_;  // [token], Q32.32, summed over the group
};

/// `oracle_topk`: each query and query head keeps its `budget` most probable tokens. Queries for
/// which `uncut` is true, those of a dense prompt, keep all tokens.
HeadStats topk_stats(const MeasuredQueries& measured, const HeadView& view, SharedRows rows,
                     std::uint32_t budget, const std::vector<bool>& uncut);

// `oracle_residual`, a greedy oracle for the metric `residual_error`:

/// Chooses victims one after another, with knowledge of one KV head's future. For each live token,
/// it computes how much the head's contribution to the residual stream would change over the next
/// kAhead queries, relative to the residual stream, if this token were evicted and no token after
/// it. The victim is the token with the smallest change. The oracle knows those queries, which a
/// policy cannot know. It knows neither later queries nor other heads. It supports only original
/// positions and no protected tokens. It needs memory for the causal half of a [token, group,
/// token] array of floats.
class ResidualOracle final : public Oracle {
 public:
  static constexpr std::uint32_t kAhead = 32;    ///< number of future queries
  static constexpr std::uint32_t kColumns = 16;  ///< number of directions of the residual stream

  /// `sketch` [group, dim, kColumns] of W_o; `norm2` [token]: squared norms of the residual stream.
  ResidualOracle(const HeadView& view, SharedRows& rows, const std::vector<float>& sketch,
                 std::vector<float> norm2);

  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;

 private:
  struct Sums;

  /// Offset in p_ of a query head's row.
  std::size_t row(std::uint32_t query, std::uint32_t head) const {
    const std::size_t before = std::size_t{query} * (std::size_t{query} + 1) / 2;
    return before * group_ + head * (std::size_t{query} + 1);
  }
  /// The probabilities that a query head gives each token under the full cache.
  const float* probabilities(std::uint32_t query, std::uint32_t head) const {
    return p_.data() + row(query, head);
  }
  const float* projected_value(std::uint32_t head, std::uint32_t token) const {
    return projected_.data() + (std::size_t{head} * tokens_ + token) * kColumns;
  }
  double change_without(std::uint32_t token, const std::vector<Sums>& sums,
                        std::uint32_t now) const;

  std::uint32_t tokens_, group_;
  std::vector<float> p_;          // [query, group, query + 1]
  std::vector<float> sinks_;      // [query, group]: probability of the sink
  std::vector<float> projected_;  // [group, token, kColumns]: W_o v
  std::vector<float> full_;       // [query, kColumns]: sum over all tokens
  std::vector<float> norm2_;      // [query]
};

}  // namespace kvlab
