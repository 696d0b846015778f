// Runs one sweep of configurations through the replay and through the brute force.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "sim/replay.hpp"
#include "tests/conformance.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/sim/random_trace.hpp"

namespace kvlab {

inline constexpr std::uint32_t kSequence = 3;  ///< every test's trace is the fourth one of its run

/// One configuration, in the form of both simulators.
struct Case {
  std::string text;  ///< for messages
  CacheConfig replay;
  brute::Config brute;
  /// Budgets by head, also for the brute force. If empty, all heads have brute.budget.
  HeadBudgets heads = {};
};

/// A case of `policy`. `sinks`, `recent`: numbers of protected tokens, by default the documented
/// ones of `policy`.
Case make_case(const std::string& policy, std::uint32_t budget, std::uint32_t chunk,
               bool cache_positions, std::optional<std::uint32_t> sinks = {},
               std::optional<std::uint32_t> recent = {});

/// A case for each combination of a policy or oracle, a prefill mode, a kind of positions, and a
/// budget: the smallest valid one, 2, a small one, and one above `tokens`.
std::vector<Case> whole_sweep(std::uint32_t tokens);

/// A case with budgets by head. The default protected tokens are resolved at each head's budget.
Case make_case_by_head(const std::string& policy, const HeadBudgets& heads, std::uint32_t chunk,
                       bool cache_positions);

/// Every policy and oracle with budgets that differ between heads and layers, in every prefill and
/// position mode.
std::vector<Case> by_head_sweep(const ModelShape& shape, std::uint32_t tokens);

/// Writes a trace with random features: every feature that a registered policy reads and that no
/// decoder computes, and one feature named "drawn".
TraceReader write_with_features(const std::filesystem::path& directory, const RandomTrace& wanted);

/// The configurations of test::covering() for the trace, with budgets around `budget` tokens.
std::vector<CacheConfig> configs_of(const test::Choices& choices, const Executor* executor,
                                    const TraceReader& trace, std::uint32_t budget);

std::vector<CacheConfig> replay_configs(const std::vector<Case>& cases);

/// Fails unless all metrics agree to `tolerance` (relative for values above 1; counts, bytes and
/// tokens exactly). `name` returns a configuration's name.
void check_measured(const ReplayResult& got, const ReplayResult& wanted, double tolerance,
                    const std::function<std::string(std::size_t)>& name);

/// Checks all cases: metrics must agree to `tolerance` (relative for values above 1; counts, bytes
/// and tokens exactly), and the kept sets must be identical at every query. A failure names the
/// case.
void check_agreement(const TraceReader& trace, const std::vector<Case>& cases,
                     ReplayOptions options, double tolerance);

}  // namespace kvlab
