// What other projects call H2O, in the words of the one rule: `h2o:preset=NAME`.
//
// Eleven public codes and five versions of the authors' own say "H2O" and keep different tokens. A
// preset is the nearest that the rule can do, with what differs; those that it cannot do are named
// too, and refused with the reason.
#pragma once

#include <span>
#include <string_view>

namespace kvlab {

struct Preset {
  std::string_view name;
  std::string_view policy;    ///< as on the command line; empty: the rule cannot hold it
  std::string_view code;      ///< whose it is
  std::string_view deviates;  ///< what the code does that the preset does not, or why there is none
};

std::span<const Preset> h2o_presets();

}  // namespace kvlab
