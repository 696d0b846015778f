// The configurations that an executor is tested with: enough of them that every two of policies,
// modifiers, budgets, prefill modes and positions occur together once.
#pragma once

#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/executor.hpp"

namespace kvlab::test {

/// The available choices. Combinations that are invalid, or that the executor refuses, are left
/// out.
struct Choices {
  /// With parameters; empty: all policies of the registry that evict and that the executor
  /// supports.
  std::vector<std::string> policies = {};
  std::vector<std::string> beside = {};  ///< additional policies
  /// Appended to a policy without modifiers; "own": the registered modifiers.
  std::vector<std::string> modifiers = {"own",
                                        "",
                                        ":every=7",
                                        ":once:smooth=2",
                                        ":every=16:smooth=3:pool=max",
                                        ":scope=layer",
                                        ":scope=layer:every=5:smooth=1",
                                        ":group=max",
                                        ":group=max:scope=layer"};
  std::vector<std::string> tier_plans = {""};
  std::vector<Budget> budgets = {};
  std::vector<Prefill> prefills = {Prefill{0}, Prefill{7}, Prefill{1}};
  std::vector<Positions> positions = {Positions::original, Positions::cache};
};

/// "24", "pyramid(24)", "ada(24)", budgets by head around this number, and budgets by layer with
/// one exempt layer, for a model with two or more heads.
std::vector<Budget> budgets_about(std::uint32_t tokens, const CacheShape& model);

/// A sample in which every two choices that can be combined occur together, by a greedy search in a
/// fixed order; all combinations if KVLAB_EVERY is set. For sequences of at most `length` tokens.
/// `executor`: null is the plain replay, which refuses nothing. Throws std::logic_error if a choice
/// that the executor does not refuse cannot be combined with anything, so that no choice is left
/// out silently.
std::vector<CacheConfig> covering(const Choices& choices, const Executor* executor,
                                  std::uint32_t length, const CacheShape& model);

/// For messages.
std::string text_of(const CacheConfig& config);

}  // namespace kvlab::test
