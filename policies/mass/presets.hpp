// Presets of h2o: what other projects call H2O, as settings of kvlab's rule: `h2o:preset=NAME`.
//
// Eleven public codes and five versions of the authors' code are named "H2O" and keep different
// tokens. A preset is the closest configuration that the rule supports, with the remaining
// differences. Codes that the rule cannot represent are listed too and refused with the reason.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct Preset {
  std::string_view name;
  std::string_view policy;  ///< as on the command line; empty: the rule cannot represent the code
  std::string_view code;    ///< the project
  /// How the code differs from the preset, or why there is no preset.
  std::string_view deviates;
};

std::span<const Preset> h2o_presets();

}  // namespace kvlab
