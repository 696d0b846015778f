// The registered policies at run time, and the text form of policies on the command line.
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
#include "policies/rule/eviction_order.hpp"
#include "policies/tiers/centre_setting.hpp"
#include "policies/tiers/tier_plan.hpp"

namespace kvlab {

/// All registered policies, in the order of the registry.
const std::vector<PolicyEntry>& policy_catalogue();

/// The command-line form: `4` or `50%`.
std::string text_of(Extent extent);
/// Parses the command-line form. Throws std::invalid_argument unless `text` is a number of tokens
/// in [min_value, 2^31) or a share in [0, 100] percent. 0% is valid only if `min_value` is 0.
Extent parse_extent(std::string_view text, std::string_view what, double min_value);

/// A policy from the command line, `name:param=value:sinks=N:recent=N`, with defaults filled in.
struct PolicySpec {
  std::shared_ptr<const PolicyEntry> entry;  ///< null: an oracle of the replay, found by name
  std::string name;
  std::vector<double> params;  ///< in the order of entry->params
  Extent sinks, recent;
  /// Whether the first prompt is protected. Its tokens are then evicted last and do not count
  /// towards the budget.
  bool prompt = false;
  std::optional<std::uint32_t> prompt_tokens = {};  ///< length of that prompt, if known
  Modifiers modifiers;
  TierPlan tier_plan = {};    ///< `tiers=4`, `tiers=16@16t+4@100%`
  CentreSetting centre = {};  ///< `centre=prompt`, `centre=@FILE`; only with a tier plan
  /// The names in entry->info.features, except that the selected feature replaces the entry
  /// `name=NAME`.
  std::vector<std::string> features;
  std::shared_ptr<const FeatureSource> feature_source = nullptr;  ///< see CompiledPolicies

  /// The feature that `name=` selects; empty if the policy has no such setting.
  std::string named_feature() const;
  /// Selects the feature `name`. Throws std::invalid_argument if the policy has no such setting or
  /// `name` is not a valid feature name.
  void name_feature(std::string_view name);

  /// Number of tokens that the setting `prompt` protects; 0 if it is off or the number is unknown.
  std::uint32_t protected_prompt_tokens() const { return prompt ? prompt_tokens.value_or(0) : 0; }

  /// The parameters in the memory layout that the entry's hooks read.
  std::vector<std::byte> packed_params() const;

  /// All settings as text, including defaults: `decay=0.9:sinks=0:recent=50%`. The name of a
  /// selected feature comes first. Modifiers are included if they are set, or if they are off
  /// although the policy's defaults set them.
  std::string params_text() const;
  /// `name:` followed by params_text(). parse_policy() converts it back to the same spec.
  std::string text() const;
  /// text() without the settings that equal the policy's defaults, for tables: `h2o:recent=25%`.
  /// parse_policy() also converts it back to the same spec.
  std::string brief() const;
};

/// Parses one policy. `oracles` are additional names, which take no parameters. `compiled` are
/// policies in addition to the registry. Throws std::invalid_argument with a message that states
/// the mistake and, for a typing error, suggests the nearest name.
PolicySpec parse_policy(std::string_view text, std::span<const std::string_view> oracles = {},
                        const CompiledPolicies& compiled = {});

/// Converts a policy in text form to its brief() form. Returns `text` unchanged if the catalogue
/// has no such policy.
std::string brief_policy(const std::string& text);

/// Parses `128`, `20%`, `64KiB`, `20%bytes`, `pyramid(20%)`, `ada(128)`. Throws
/// std::invalid_argument for 0, a negative number or more than 100%.
Budget parse_budget(std::string_view text);

/// The numbers of protected tokens of `spec` for a budget of `budget` tokens. `budget` includes the
/// prompt tokens that the setting `prompt` protects, which count as sinks. Throws
/// std::invalid_argument unless sinks + recent <= budget and sinks < budget.
ProtectedTokens resolve_protected_tokens(const PolicySpec& spec, std::uint32_t budget);
/// The smallest budget that holds the protected tokens of `spec`; 1 for an oracle. Protected tokens
/// that are given as shares of the budget are not counted.
std::uint32_t min_budget(const PolicySpec& spec);

/// Parses `original` or `cache`. Throws std::invalid_argument for any other text.
Positions parse_positions(std::string_view text);
std::string_view name_of(Positions positions);

/// How a prompt is appended: all at once (dense), or in chunks (stream = chunk:1).
struct Prefill {
  std::uint32_t chunk = 0;  ///< tokens per append; 0: the whole prompt

  std::string text() const;
};
Prefill parse_prefill(std::string_view text);

/// The candidate with the smallest edit distance to `word`, if it is close enough for a typing
/// error.
std::optional<std::string> nearest_name(std::string_view word,
                                        std::span<const std::string> candidates);

}  // namespace kvlab
