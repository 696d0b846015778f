// The configurations with which an executor is tested. Policies, modifiers, tier plans, budgets,
// prefill modes and positions are combined so that every two choices that are valid together occur
// together at least once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"
#include "policies/executor.hpp"

namespace kvlab::test {

/// The available choices. Combinations that are invalid, or that the executor refuses, are left
/// out.
struct Choices {
  /// Policies with their parameters. If the list is empty, it stands for all policies of the
  /// registry that evict and that the executor supports.
  std::vector<std::string> policies = {};
  std::vector<std::string> beside = {};  ///< additional policies
  /// Texts that are appended to a policy whose default modifiers are turned off. "own" stands for
  /// the policy's default modifiers.
  std::vector<std::string> modifiers = {"own",
                                        "",
                                        ":every=7",
                                        ":smooth=2",
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

/// Budgets of about `tokens` tokens. For 24 they are "24", "pyramid(24)", "ada(24)", budgets by
/// head, and budgets by layer. If the model has several layers, there are also budgets by layer
/// with one exempt layer.
std::vector<Budget> budgets_about(std::uint32_t tokens, const CacheShape& model);

/// Returns a sample of configurations for sequences of at most `length` tokens. Every two choices
/// that can be combined occur together in one of them. A greedy search in a fixed order finds the
/// sample. If the environment variable KVLAB_EVERY is set, all combinations are returned.
/// Configurations that `executor` refuses are left out. A null `executor` means the plain replay,
/// which refuses nothing. Throws std::logic_error if a choice is in no valid combination, so that
/// no choice is left out silently.
std::vector<CacheConfig> covering(const Choices& choices, const Executor* executor,
                                  std::uint32_t length, const CacheShape& model);

/// The configuration as text, for messages.
std::string text_of(const CacheConfig& config);

/// Centres of all heads that differ in every channel.
std::shared_ptr<const CentreConstants> some_centres(const CacheShape& model);

}  // namespace kvlab::test
