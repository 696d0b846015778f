#include "sim/report/palette.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <stdexcept>

namespace kvlab {
namespace {

// After Okabe and Ito, darkened for a light page where yellow and sky would be too faint.
constexpr std::array kColours{
    PageColour{"ink", "#1c2024", "#e6e8ea"},       PageColour{"muted", "#6b7278", "#9aa2a9"},
    PageColour{"rule", "#d9dde1", "#3a4046"},      PageColour{"blue", "#0063a8", "#4da3e0"},
    PageColour{"sky", "#2f97d0", "#8fd0f5"},       PageColour{"green", "#00805e", "#2fbf95"},
    PageColour{"vermilion", "#c64a00", "#f0803c"}, PageColour{"orange", "#c98500", "#f0b63c"},
    PageColour{"grey", "#858b91", "#a3a9af"},      PageColour{"purple", "#a94f86", "#dd93bd"},
    PageColour{"wine", "#7d2248", "#cf6f97"},      PageColour{"olive", "#7d7a1e", "#c4c05a"},
};

struct FixedStyle {
  std::string_view policy;
  SeriesStyle style;
};

constexpr std::array kFixed{
    FixedStyle{"window", {"blue", 1, 5}},
    FixedStyle{"sink", {"sky", 2, 7}},
    FixedStyle{"lru", {"green", 1, 9}},
    FixedStyle{"h2o", {"vermilion", 1, 11}},
    FixedStyle{"streaming_h2o", {"orange", 2, 13}},
    FixedStyle{"random", {"grey", 4, 2}},
    FixedStyle{kOracleMass, {"ink", 2, 0}},
    FixedStyle{kOracleTopk, {"ink", 3, 0}},
    FixedStyle{"full", {"muted", 1, 0}},
};

constexpr std::array kSpare{SeriesStyle{"purple", 1, 6}, SeriesStyle{"wine", 1, 4},
                            SeriesStyle{"olive", 1, 8}};
constexpr std::array kMarkers{5, 7, 9, 11, 13, 4, 6, 8, 10, 12};

/// The style of a policy's first series.
SeriesStyle style_of(std::string_view policy, std::size_t& spares_used) {
  for (const FixedStyle& fixed : kFixed)
    if (fixed.policy == policy) return fixed.style;
  const std::size_t used = spares_used++, again = used / kSpare.size();
  SeriesStyle style = kSpare[used % kSpare.size()];
  style.dash = 1 + static_cast<int>(again % 5);
  style.point = kMarkers[(static_cast<std::size_t>(style.point) + again) % kMarkers.size()];
  return style;
}

}  // namespace

std::span<const PageColour> page_colours() { return kColours; }

std::string_view light_of(std::string_view name) {
  for (const PageColour& colour : kColours)
    if (colour.name == name) return colour.light;
  throw std::out_of_range("no such page colour: " + std::string(name));
}

std::vector<SeriesStyle> styles_of(std::span<const Series> series) {
  struct Used {
    SeriesStyle first;
    std::size_t count = 0;
  };
  std::map<std::string_view, Used> used;
  std::size_t spares_used = 0;
  std::vector<SeriesStyle> styles;
  for (const Series& entry : series) {
    const auto [place, added] = used.try_emplace(entry.policy);
    Used& policy = place->second;
    if (added) policy.first = style_of(entry.policy, spares_used);
    SeriesStyle style = policy.first;
    if (policy.count > 0) {
      style.dash =
          1 + static_cast<int>((static_cast<std::size_t>(style.dash) - 1 + policy.count) % 5);
      if (style.point)
        style.point =
            kMarkers[(static_cast<std::size_t>(style.point) + policy.count) % kMarkers.size()];
    }
    ++policy.count;
    styles.push_back(style);
  }
  return styles;
}

}  // namespace kvlab
