// The replay's own references: not policies, and never deployed.
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
  /// The order of leaving before `step.now` is admitted: who leaves has a rank below all others.
  /// positions and ranks [count], by age.
  virtual void rank(const std::uint32_t* positions, std::size_t count, const Step& step,
                    std::uint64_t* ranks) = 0;
};

/// The hooks of a live set that evicts by an oracle, which has to outlive it.
PolicyOps oracle_ops();
std::vector<std::byte> oracle_params(Oracle& oracle);

/// `oracle_mass`: ranks a token by the probability mass that the full cache will yet give it.
class MassOracle final : public Oracle {
 public:
  MassOracle(const HeadView& view, SharedRows rows);
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
HeadStats topk_stats(const QuerySpan& span, const HeadView& view, SharedRows rows,
                     std::uint32_t budget, const std::vector<bool>& uncut);

}  // namespace kvlab
