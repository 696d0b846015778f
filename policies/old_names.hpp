// Names that version 0.6 changed. Options, policies, files and headers that
// were written with them are read for one release more; kvlab itself writes the new names alone.
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
/// Options of the command line, without dashes. Python's keywords are named alike.
inline constexpr OldName kOldOptions[] = {{"columns", "features"},
                                          {"draws", "samples"},
                                          {"grid", "sweep"},
                                          {"ladder", "tiers"},  // old name
                                          {"span", "queries"},
                                          {"span-of", "passage"},
                                          {"synthetic-draws", "synthetic-gradient-samples"}};
/// Words of a policy's header.
inline constexpr OldName kOldHeaderWords[] = {{"HighestLeaves", "HighestEvictedFirst"},
                                              {"LowestLeaves", "LowestEvictedFirst"},
                                              {"admit", "append"},  // old name
                                              {"by_column", "by_feature"},
                                              {"column", "feature"},
                                              {"column_count", "feature_count"},
                                              {"columns", "features"},
                                              {"kMaxColumns", "kMaxFeatures"}};

/// What is called `name` now; `name` itself if that never changed.
constexpr std::string_view current_name(std::span<const OldName> names, std::string_view name) {
  const auto found = std::ranges::find(names, name, &OldName::before);
  return found == names.end() ? name : found->now;
}

/// A policy in today's names: `column:name=x:ladder=4` is `feature:name=x:tiers=4`. // old name
std::string current_policy(std::string_view policy);

/// Settings of a policy in today's names, as results have them: `sinks=4:ladder=4`. // old name
std::string current_params(std::string_view params);

/// A metric in today's names: `span_recall:needle` is `passage_recall:needle`.
std::string current_metric(std::string_view metric);

}  // namespace kvlab
