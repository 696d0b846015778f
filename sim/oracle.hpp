// The replay's own references: not policies, and never deployed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "policies/states.hpp"
#include "sim/metrics.hpp"
#include "sim/shared_rows.hpp"

namespace kvlab {

/// `oracle_mass`: ranks a token by the probability mass that the full cache will yet give it.
class FutureMassStates final : public PolicyStates {
 public:
  using Masses = std::shared_ptr<const std::vector<std::uint64_t>>;  // [token], Q32.32
  explicit FutureMassStates(Masses masses) : masses_(std::move(masses)) {}

  void reserve(std::size_t) override {}
  void admit(std::uint32_t, Token, const Step&) override {}
  void observe(std::span<const std::uint32_t>, std::span<const Observation>, const Step&) override {
  }
  void rank(std::span<const std::uint32_t>, std::span<const std::uint32_t> positions, const Step&,
            std::span<std::uint64_t> ranks) const override {
    for (std::size_t i = 0; i < positions.size(); ++i) ranks[i] = (*masses_)[positions[i]];
  }
  float weight(std::uint32_t) const override { return 1; }
  std::uint32_t tail() const override { return kNoTail; }
  std::span<const std::byte> bytes(std::uint32_t) const override { return {}; }

 private:
  Masses masses_;
};

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
    HeadStats stats;
  };
  TopkRun(const QuerySpan& span, std::uint32_t group) : span_(span), group_(group) {}

  void add(std::uint32_t budget, std::vector<bool> uncut);
  bool wants_row(std::uint32_t query) const {
    return !configurations_.empty() && span_.contains(query);
  }
  void attend(std::uint32_t query, SharedRows& rows);
  const std::vector<Configuration>& configurations() const { return configurations_; }

 private:
  void attend_head(std::uint32_t query, std::uint32_t head, SharedRows& rows);

  const QuerySpan& span_;
  std::uint32_t group_;
  std::vector<Configuration> configurations_;
  std::vector<std::uint32_t> order_;  // tokens, the most probable first
};

}  // namespace kvlab
