// The replay's oracles: not policies, and never deployed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "policies/ops/ops.hpp"
#include "sim/metrics.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

/// Who leaves one KV head, said by one who knows the future.
class Oracle {
 public:
  virtual ~Oracle() = default;
  /// The eviction order before `step.now` is appended: which token is evicted has a rank below all
  /// others. positions and ranks [count], by age.
  virtual void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                    std::uint64_t* ranks) = 0;
};

/// The hooks of a live set that evicts by an oracle, which has to outlive it.
PolicyOps oracle_ops();
std::vector<std::byte> oracle_params(Oracle& oracle);

/// `oracle_attention`: ranks a token by the probability mass that the full cache will yet give it.
class AttentionOracle final : public Oracle {
 public:
  AttentionOracle(const HeadView& view, SharedRows rows);
  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;

 private:
  void add(std::uint32_t first, std::uint32_t end, std::vector<std::uint64_t>& masses);

  std::uint32_t group_, spent_ = 0;  // queries that are in given_
  SharedRows rows_;
  std::vector<std::uint64_t> all_, given_;  // [token], Q32.32, group summed
};

/// `oracle_topk`: each query and query head keeps its `budget` most probable tokens. Queries for
/// which `uncut` is true keep all (the prompt of a dense prefill).
HeadStats topk_stats(const MeasuredQueries& measured, const HeadView& view, SharedRows rows,
                     std::uint32_t budget, const std::vector<bool>& uncut);

// `oracle_residual`: a greedy reference for `residual_error`.

/// One KV head's future, from which it says which token is evicted: one token after another, each
/// time the one without which the head's part of the residual stream would change least over the
/// next kAhead queries, relative to the stream, if nobody else left. It assumes what a policy
/// cannot know: those queries; and it looks at nothing beyond them, nor at other heads. Original
/// positions; no protected tokens. Memory: [token, group, token] floats, the half of it that is
/// causal.
class ResidualOracle final : public Oracle {
 public:
  static constexpr std::uint32_t kAhead = 32;    ///< queries
  static constexpr std::uint32_t kColumns = 16;  ///< directions of the residual stream

  /// `sketch` [group, dim, kColumns] of W_o; `norm2` [token]: of the residual stream.
  ResidualOracle(const HeadView& view, SharedRows& rows, const std::vector<float>& sketch,
                 std::vector<float> norm2);

  void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
            std::uint64_t* ranks) override;

 private:
  struct Sums;

  /// Where p_ has the row of a query head.
  std::size_t row(std::uint32_t query, std::uint32_t head) const {
    const std::size_t before = std::size_t{query} * (std::size_t{query} + 1) / 2;
    return before * group_ + head * (std::size_t{query} + 1);
  }
  /// What a query head gives each token under the full cache.
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
  std::vector<float> sinks_;      // [query, group]: what no token gets
  std::vector<float> projected_;  // [group, token, kColumns]: W_o v
  std::vector<float> full_;       // [query, kColumns]: what all tokens come to
  std::vector<float> norm2_;      // [query]
};

}  // namespace kvlab
