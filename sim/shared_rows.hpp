// The attention rows of the full cache for one KV head, computed for one block of queries at a
// time. At original positions, a configuration gets its probabilities from these rows by leaving
// out the exponentials of tokens that are not live.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sim/cache/host_cache.hpp"
#include "sim/head_view.hpp"
#include "traces/base/numeric/panels.hpp"
#include "traces/base/numeric/rope.hpp"

namespace kvlab {

class SharedRows : public FullRows {
 public:
  SharedRows(const HeadView& view, const RopeTable& rope, const HeadArithmetic& arithmetic);

  /// Number of queries per block: enough to reuse keys, and few enough to stay in the CPU cache.
  std::uint32_t block_queries() const { return block_; }
  /// Computes the rows of queries [first, first + count); count <= block_queries().
  void compute(std::uint32_t first, std::uint32_t count);

  /// The row of one query head: the exponentials of tokens 0 to query (0 for tokens outside the
  /// layer's window), and their sum, which includes the exponential `sink` of the sink logit.
  struct Row {
    std::span<const float> e;  // [query + 1]
    float sum, sink;
  };
  Row row(std::uint32_t query, std::uint32_t head) const;

  /// The earlier tokens that a query head requests in the full cache. The query's own token is left
  /// out (as in the set N_t of docs/reference/metrics.md).
  struct Requests {
    std::span<const std::uint8_t> flags;  // [query]
    std::uint32_t count;
  };
  Requests requests(std::uint32_t query, std::uint32_t head);

  /// The full cache's attention output, [dim].
  std::span<const float> output(std::uint32_t query, std::uint32_t head);

  /// The gradients of a query, [gradient sample, group, dim]; there are gradient_samples() of them.
  const float* gradients(std::uint32_t query) { return gradients_.row(query); }
  std::uint32_t gradient_samples() const { return gradients_.gradient_samples(); }

  /// The probabilities over the live tokens, computed from the exponentials of the full row. If
  /// these exponentials have lost precision, they are computed again from the logits.
  void probabilities(std::uint32_t query, std::uint32_t head, std::span<const std::uint32_t> live,
                     float* p) override;

 private:
  void logits(std::uint32_t query, std::uint32_t head, std::span<const std::uint32_t> tokens,
              float* out) const;
  std::size_t index(std::uint32_t query, std::uint32_t head) const {
    return std::size_t{query - first_} * view_.group + head;
  }
  void rotate(const float* x, std::uint32_t position, float* y) const {
    rotate_original(rope_, arithmetic_, x, view_.head_size, position, y);
  }

  HeadView view_;
  const RopeTable& rope_;
  HeadArithmetic arithmetic_;
  Panels keys_;  // [token, dim], rotated
  std::uint32_t block_, first_ = 0;
  std::size_t stride_;                       // floats between rows of e_
  std::vector<float> queries_;               // [block, group, dim], rotated
  std::vector<float> e_;                     // [block, group, token]
  std::vector<float> sums_, sinks_;          // [block, group]
  std::vector<std::uint8_t> flags_;          // [block, group, token]
  std::vector<std::int64_t> request_count_;  // [block, group]; -1: not computed
  std::vector<float> outputs_, p_;           // [block, group, dim]; p_: probabilities of one row
  std::vector<bool> has_output_;
  GradientBlock gradients_;
};

}  // namespace kvlab
