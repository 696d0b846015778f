// Which configurations an executor is held to: of every policy with every modifier, budget, prefill
// mode and kind of positions, as many as it takes for each two of these to meet once.
#pragma once

#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/executor.hpp"

namespace kvlab::test {

/// What there is to choose from. What does not go together, or what the executor refuses, is left
/// out.
struct Choices {
  /// With parameters; empty: all of the registry that evict and the executor knows.
  std::vector<std::string> policies = {};
  std::vector<std::string> beside = {};  ///< further ones
  /// Behind a policy that has none of its own; "own": as it is registered.
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

/// "24", "pyramid(24)", "ada(24)", numbers by head about it, and by layer but for one that is
/// exempt, of a model of two or more heads.
std::vector<Budget> budgets_about(std::uint32_t tokens, const CacheShape& model);

/// A sample in which each two choices meet that can, by a greedy search in an order of its own; all
/// there are where the environment has KVLAB_EVERY. For sequences of at most `length` tokens.
/// `executor`: null is the plain replay, which refuses nothing. Throws std::logic_error if a choice
/// that the executor does not refuse goes with nothing: none is left out silently.
std::vector<CacheConfig> covering(const Choices& choices, const Executor* executor,
                                  std::uint32_t length, const CacheShape& model);

/// For messages.
std::string text_of(const CacheConfig& config);

}  // namespace kvlab::test
