// Compares the attention that a decoder computed, its outputs and its observations, with float64
// attention over the same live tokens.
#pragma once

#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "engine/checkpoint/model.hpp"
#include "engine/evaluation/verify.hpp"
#include "engine/evaluation/verify/float64_attention.hpp"
#include "policies/observation.hpp"

namespace kvlab {

/// The largest relative error of one rounding to `dtype`. For float32 (nullopt), the largest error
/// of a sum, because sums are computed in float32.
double unit_error(std::optional<Dtype> dtype);

/// One KV head of an append: its live tokens, and what the decoder observed of each, oldest first.
struct AttendingHead {
  const LiveSet* live;
  std::span<const Observation> seen;
};

class AttentionCheck {
 public:
  /// `rounding`: the dtype that the decoder rounds queries, keys and values to.
  AttentionCheck(const ModelConfig& config, const ResolvedConfig& cache,
                 std::optional<Dtype> rounding, unsigned threads);

  const HeadTokens& tokens(std::uint32_t layer, std::uint32_t kv_head) const {
    return tokens_[std::size_t{layer} * shape_.kv_heads + kv_head];
  }
  /// Adds the tensors of a layer's next append.
  void append(std::uint32_t layer, const HeadTokens::Tensors& tensors);
  /// Compares the outputs of the append's queries, `out` [token, query_head, dim]. `heads`: all KV
  /// heads.
  void check(std::uint32_t layer, const Append& append, std::span<const AttendingHead> heads,
             std::span<const float> out);
  /// Adds the results of checks (b) and (d).
  void add_to(VerifyReport& report) const;

 private:
  /// Errors of outputs, relative to AttentionRow::scale.
  struct OutputErrors {
    std::uint64_t rows = 0;
    double worst = 0, worst_plain = 0;  // plain: of a plain attention in the decoder's dtype
    void add(const OutputErrors& other);
  };
  /// What should have been observed for one token, computed in float64.
  struct Expected {
    double mass = 0, plain_mass = 0;  // plain: as in OutputErrors
    // Number of queries that certainly requested the token, and number of queries whose probability
    // is too near the threshold to decide.
    std::uint32_t requests = 0, unclear = 0;
    std::uint32_t last_request = 0, queries = 0;
  };
  struct HeadCheck {
    OutputErrors outputs;
    std::vector<Expected> expected;  // [live token]; empty if nothing is observed
  };
  /// One query's attention in float64, and a plain one in the decoder's dtype.
  struct CheckedRow {
    AttentionRow exact;
    std::optional<AttentionRow> plain;
  };
  /// A query, and the number of younger queries in its append.
  struct Query {
    std::uint32_t position, younger;
  };

  HeadCheck check_head(std::uint32_t layer, std::uint32_t kv_head, const Append& append,
                       const LiveSet& live, std::span<const float> out) const;
  std::vector<CheckedRow> rows_of_query(std::uint32_t layer, std::uint32_t kv_head,
                                        const LiveSet& live, Query query, const AttendedRows& rows,
                                        const AttendedRows& plain) const;
  static void check_output(const CheckedRow& row, std::span<const float> out, OutputErrors& errors);
  static double relative_error(const CheckedRow& row, double threshold);
  void expect_from_query(const LiveSet& live, Query query, std::span<const CheckedRow> group,
                         std::vector<Expected>& expected) const;
  void check_observations(const AttendingHead& head, std::span<const Expected> expected);
  OutputCheck outputs() const;

  const ModelConfig& config_;
  ModelShape shape_;
  std::uint32_t threshold16_;
  std::optional<Dtype> rounding_;
  unsigned threads_;
  std::vector<Float64Attention> attention_;  // [layer], like the next two members
  std::vector<GrowingRope> ropes_;
  std::vector<OutputErrors> outputs_;
  std::deque<HeadTokens> tokens_;  // [layer, kv_head]
  std::uint64_t observations_ = 0, wrong_requests_ = 0;
  double worst_mass_ = 0, worst_plain_mass_ = 0;
};

}  // namespace kvlab
