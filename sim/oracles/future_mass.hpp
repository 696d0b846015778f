// The replay's own references: not policies, and never deployed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "policies/ops/ops.hpp"
#include "sim/row_measure.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

/// `oracle_mass`: ranks a token by the probability mass that the full cache will yet give it. Its
/// parameters are where those masses are: [token], Q32.32; they must outlive the live set.
PolicyOps future_mass_ops();
std::vector<std::byte> future_mass_params(const std::vector<std::uint64_t>& masses);

/// The mass each token gets from all queries of the full cache, group summed: one more exact pass.
std::vector<std::uint64_t> total_masses(std::uint32_t tokens, std::uint32_t group,
                                        SharedRows& rows);

/// `oracle_topk` at several budgets: each query and query head keeps its B most probable tokens.
/// Queries for which `uncut` is true keep all (the prompt of a dense prefill).
class TopkRun {
 public:
  struct Configuration {
    std::uint32_t budget;
    std::vector<bool> uncut;  // [token]
  };
  TopkRun(const QuerySpan& span, std::uint32_t group, std::vector<Configuration> configurations)
      : group_(group),
        configurations_(std::move(configurations)),
        measure_(&span, configurations_.size(), {.group = group}, 1) {}

  bool wants_row(std::uint32_t query) const {
    return !configurations_.empty() && measure_.measures(query);
  }
  void attend(std::uint32_t query, SharedRows& rows);
  /// By configuration.
  std::vector<HeadStats> take() { return measure_.take(); }

 private:
  void attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);

  std::uint32_t group_;
  std::vector<Configuration> configurations_;
  RowMeasure measure_;
  std::vector<std::uint32_t> order_;  // tokens, the most probable first
};

}  // namespace kvlab
