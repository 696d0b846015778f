// The only reader of policy.json, for the command line and for the C library. It has no list of
// policies. So its callers check whether the policy exists, whether its parameters are in range,
// and whether the budget suffices.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "policies/catalogue.hpp"

namespace kvlab {

inline constexpr int kPolicyFormat = 1;
inline constexpr std::size_t kMaxPolicyBytes = std::size_t{16} << 20;

/// What a policy.json says.
struct PolicyJson {
  struct Source {
    std::string path, xxh3;
  };

  std::string path;                                    ///< of the file, for errors
  std::string policy;                                  ///< a name, without settings
  std::vector<std::pair<std::string, double>> params;  ///< in the order of their names
  std::string feature;  ///< the token feature that the parameter `name` selects; empty: none
  Extent sinks, recent;
  bool prompt = false;  ///< as in PolicySpec
  /// Names and values as set_modifier() takes them. Modifiers that are missing keep the policy's
  /// default.
  std::vector<std::pair<std::string, std::string>> modifiers;
  std::string tiers;   ///< a tier plan; empty: 16 bit
  std::string centre;  ///< none, prompt or @FILE; empty: none
  Budget budget;       ///< in tokens, by head, in bytes, or split by a formula
  Positions positions = Positions::original;
  Prefill prefill;
  double threshold = 0;
  std::uint64_t seed = 0;
  std::optional<Source> source;
  std::string model, weights_xxh3;
  nlohmann::json run;  ///< null if not given

  /// Returns the values of the policy's parameters, in the order of `names`. Throws
  /// std::runtime_error unless the file has exactly these parameters. The file must name a feature
  /// if, and only if, `takes_feature` is true.
  std::vector<double> params_of(std::span<const std::string_view> names, bool takes_feature) const;
  /// Throws std::runtime_error with the message `FILE: WHAT`.
  [[noreturn]] void fail(std::string_view what) const;
};

/// Parses the text of a policy.json. `path` names the file in errors. Throws std::runtime_error
/// that names the file and the key for a later format, an unknown or reserved key, a missing key,
/// and a value of the wrong type. Also reads the key names of version 0.5.
PolicyJson parse_policy_json(std::string_view text, const std::string& path);

}  // namespace kvlab
