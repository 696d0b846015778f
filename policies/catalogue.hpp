// The registry at run time, and how a policy is written on the command line.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/budgets/budget.hpp"
#include "policies/entry.hpp"
#include "policies/rule.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {

/// Every registered policy, in the registry's order.
const std::vector<PolicyEntry>& policy_catalogue();

/// As written on the command line: `4` or `50%`.
std::string text_of(Extent extent);
/// Likewise read: a count or a share. Throws std::invalid_argument unless it lies in [least, 2^31)
/// tokens or in [0, 100] percent, where no share is 0 unless `least` is.
Extent parse_extent(std::string_view text, std::string_view what, double least);

/// A policy as requested: `name:param=value:sinks=N:recent=N`, defaults filled in.
struct PolicySpec {
  std::shared_ptr<const PolicyEntry> entry;  ///< null: a reference of the replay, found by name
  std::string name;
  std::vector<double> params;  ///< in the order of entry->params
  Extent sinks, recent;
  bool prompt =
      false;  ///< the protection: the first prompt's tokens are evicted last; budgets are beside it
  std::optional<std::uint32_t> prompt_tokens = {};  ///< of that prompt, where it is known
  Modifiers modifiers;
  TierPlan tier_plan = {};            ///< `tiers=4`, `tiers=16@16t+4@100%`
  std::vector<std::string> features;  ///< as entry->info.features, with the one that `name=` gives
  std::shared_ptr<const FeatureSource> feature_source = nullptr;  ///< as in CompiledPolicies

  /// The name that `name=` gives; empty where the policy does not ask for one.
  std::string named_feature() const;
  /// Makes `name` the feature that the policy requests. Throws std::invalid_argument: it requests
  /// none, or this is no name.
  void name_feature(std::string_view name);

  /// How many the protection `prompt` holds, where they are known.
  std::uint32_t protected_prompt_tokens() const { return prompt ? prompt_tokens.value_or(0) : 0; }

  /// The parameters as the entry's hooks take them.
  std::vector<std::byte> packed_params() const;

  /// Every parameter and protection, defaults too, as requested: `decay=0.9:sinks=0:recent=50%`. Of
  /// the modifiers those that are there, and those that the policy has and this has not. A
  /// feature's name comes first.
  std::string params_text() const;
  /// `name:` and params_text(): parses back to the same spec.
  std::string text() const;
  /// The same without the settings that are the policy's own defaults, for rows that people read:
  /// `h2o:recent=25%`. Parses back too.
  std::string brief() const;
};

/// Parses one policy. `references` are further names that take no parameters; `compiled` are
/// policies beside the registry's. Throws std::invalid_argument that names the mistake and,
/// for a near miss, the nearest name.
PolicySpec parse_policy(std::string_view text, std::span<const std::string_view> oracles = {},
                        const CompiledPolicies& compiled = {});

/// brief() of a policy's text; as it stands where it names none of the catalogue.
std::string brief_policy(const std::string& text);

/// Parses `128`, `20%`, `64KiB`, `20%bytes`, `pyramid(20%)`, `ada(128)`. Throws
/// std::invalid_argument for 0, a negative number, or more than 100%.
Budget parse_budget(std::string_view text);

/// The protected tokens of `spec` in tokens, of a budget with the tokens that the protection
/// `prompt` holds; these are among the sinks. Throws std::invalid_argument unless sinks + recent <=
/// budget and sinks < budget.
ProtectedTokens resolve_protected_tokens(const PolicySpec& spec, std::uint32_t budget);
/// The smallest budget that protected tokens given in tokens fit, were there no others; 1 of a
/// reference.
std::uint32_t min_budget(const PolicySpec& spec);

/// original, cache. Throws std::invalid_argument otherwise.
Positions parse_positions(std::string_view text);
std::string_view name_of(Positions positions);

/// How a prompt is appended: all at once (dense), or in chunks (stream = chunk:1).
struct Prefill {
  std::uint32_t chunk = 0;  ///< tokens an append; 0: the whole prompt

  std::string text() const;
};
Prefill parse_prefill(std::string_view text);

/// The candidate nearest to `word` by edit distance, if near enough to be a slip.
std::optional<std::string> nearest_name(std::string_view word,
                                        std::span<const std::string> candidates);

}  // namespace kvlab
