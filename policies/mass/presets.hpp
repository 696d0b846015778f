// Presets of h2o (`h2o:preset=NAME`): the policies that other projects call H2O, expressed as
// settings of kvlab's rule.
//
// Eleven public implementations and five versions of the authors' code are named "H2O", and they
// keep different tokens. A preset is the closest configuration that the rule supports, with a text
// about the remaining differences. The list also contains implementations that the rule cannot
// represent. Selecting one of these is an error, whose message says why.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct Preset {
  std::string_view name;
  std::string_view policy;  ///< as on the command line; empty: the rule cannot represent it
  std::string_view code;    ///< name of the project that contains it
  /// How the implementation differs from the preset, or why there is no preset.
  std::string_view deviates;
};

std::span<const Preset> h2o_presets();
/// The presets that `POLICY:preset=NAME` selects from: those of `h2o`, and one of `lru`. Empty for
/// another policy.
std::span<const Preset> presets_of(std::string_view policy);

}  // namespace kvlab
