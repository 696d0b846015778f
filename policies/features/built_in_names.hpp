// Names of the built-in features. Host only.
#pragma once

#include <algorithm>
#include <iterator>
#include <optional>
#include <string_view>

#include "policies/features/built_in.hpp"

namespace kvlab {

/// In the order of BuiltInFeature.
inline constexpr std::string_view kBuiltInFeatures[] = {"key_norm", "value_norm", "value_norm1",
                                                        "key_cosine", "value_out_norm1"};

/// The feature of that name, if it is built in.
inline std::optional<BuiltInFeature> built_in_feature(std::string_view name) {
  const auto* const found = std::ranges::find(kBuiltInFeatures, name);
  if (found == std::end(kBuiltInFeatures)) return std::nullopt;
  return static_cast<BuiltInFeature>(found - std::begin(kBuiltInFeatures));
}

}  // namespace kvlab
