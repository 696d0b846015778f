// Names that version 0.6 changed. Options, policies, files and headers with the old names can still
// be read for one release. kvlab itself writes only the new names.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <string_view>

namespace kvlab {

struct OldName {
  std::string_view before, now;
};

/// Policies and oracles.
inline constexpr OldName kOldPolicies[] = {{"column", "feature"},
                                           {"oracle_mass", "oracle_attention"}};  // old name
/// Settings of a policy: the name before the `=`.
inline constexpr OldName kOldSettings[] = {{"ladder", "tiers"}};  // old name
/// Metrics; the part before the colon of `passage_recall:NAME`.
inline constexpr OldName kOldMetrics[] = {{"code_error", "quantization_error"},
                                          {"regret_mass", "regret_recall"},
                                          {"span_recall", "passage_recall"}};
/// Options of the command line, without dashes. Keywords in Python have the same names.
inline constexpr OldName kOldOptions[] = {{"columns", "features"},
                                          {"draws", "samples"},
                                          {"grid", "sweep"},
                                          {"ladder", "tiers"},  // old name
                                          {"span", "queries"},
                                          {"span-of", "passage"},
                                          {"synthetic-draws", "synthetic-gradient-samples"}};
/// Commands, and the words that replace them.
inline constexpr OldName kOldCommands[] = {{"allocate", "plan --by head"}};
/// Identifiers in a policy's header.
inline constexpr OldName kOldHeaderWords[] = {{"HighestLeaves", "HighestEvictedFirst"},
                                              {"LowestLeaves", "LowestEvictedFirst"},
                                              {"admit", "append"},  // old name
                                              {"by_column", "by_feature"},
                                              {"column", "feature"},
                                              {"column_count", "feature_count"},
                                              {"columns", "features"},
                                              {"kMaxColumns", "kMaxFeatures"}};

/// The current name of the thing that is or was called `name`. Returns `name` if it never changed.
constexpr std::string_view current_name(std::span<const OldName> names, std::string_view name) {
  const auto found = std::ranges::find(names, name, &OldName::before);
  return found == names.end() ? name : found->now;
}

/// A policy with the current names:
/// `column:name=x:ladder=4` becomes `feature:name=x:tiers=4`. // old name
std::string current_policy(std::string_view policy);

/// The settings of a policy, in the form of result files, with the current names:
/// `sinks=4:ladder=4` becomes `sinks=4:tiers=4`. // old name
std::string current_params(std::string_view params);

/// A metric with its current name: `span_recall:needle` becomes
/// `passage_recall:needle`.
std::string current_metric(std::string_view metric);

}  // namespace kvlab
