#include "sim/report/palette.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>
#include <stdexcept>

#include "traces/base/json.hpp"

namespace kvlab {
namespace {

// The first after Okabe and Ito, darkened for a light page; the others as far from all before them
// as could be, at a contrast of 3 to 1 with the page.
constexpr std::array kColours{
    PageColour{"ink", "#1c2024", "#e6e8ea"},       PageColour{"muted", "#6b7278", "#9aa2a9"},
    PageColour{"rule", "#d9dde1", "#3a4046"},      PageColour{"blue", "#0063a8", "#4da3e0"},
    PageColour{"sky", "#2f97d0", "#8fd0f5"},       PageColour{"green", "#00805e", "#2fbf95"},
    PageColour{"vermilion", "#c64a00", "#f0803c"}, PageColour{"orange", "#c98500", "#f0b63c"},
    PageColour{"grey", "#858b91", "#a3a9af"},      PageColour{"purple", "#a94f86", "#dd93bd"},
    PageColour{"wine", "#7d2248", "#cf6f97"},      PageColour{"olive", "#7d7a1e", "#c4c05a"},
    PageColour{"brown", "#864401", "#ae8057"},     PageColour{"navy", "#000093", "#696be5"},
    PageColour{"violet", "#b56ffe", "#efbbff"},    PageColour{"moss", "#3d4903", "#7a8001"},
    PageColour{"rose", "#fe4b7f", "#ffb7b3"},      PageColour{"lime", "#0da926", "#53fead"},
    PageColour{"slate", "#044262", "#0781bc"},     PageColour{"indigo", "#6357f0", "#afa9f7"},
    PageColour{"rust", "#590b01", "#d14b14"},      PageColour{"plum", "#460261", "#7c7393"},
    PageColour{"pink", "#ce7e83", "#ff7281"},      PageColour{"orchid", "#d847be", "#ed8efd"},
    PageColour{"mauve", "#644885", "#b78ed4"},     PageColour{"magenta", "#6f10b1", "#b67cf6"},
    PageColour{"crimson", "#ba003a", "#d6466a"},   PageColour{"amethyst", "#9e3ccf", "#b653ba"},
    PageColour{"royal", "#2e2dc2", "#8a84cf"},     PageColour{"coral", "#fe5a05", "#d8a27f"},
};

const std::map<std::string_view, std::string_view>& shelf() {
  static const std::map<std::string_view, std::string_view> kShelf{
      {"window", "blue"},        {"sink", "sky"},       {"lru", "green"},
      {"h2o", "vermilion"},      {"random", "grey"},    {"streaming_h2o", "orange"},
      {"a2sf", "wine"},          {"tova", "purple"},    {"lfu", "olive"},
      {"h2o_mean", "brown"},     {"roco", "navy"},      {"scissorhands", "violet"},
      {"lazy_eviction", "moss"}, {"snapkv", "rose"},    {"nacl", "lime"},
      {"knorm", "slate"},        {"keydiff", "indigo"}, {"vatp", "rust"},
      {"criticalkv", "plum"},    {"lagkv", "pink"},     {"expected_attention", "orchid"},
      {"r_kv", "mauve"},         {"column", "magenta"}, {"full", "muted"}};
  return kShelf;
}

/// Colours of policies that are not of the shelf.
constexpr std::array<std::string_view, 4> kOwn{"crimson", "amethyst", "royal", "coral"};

// Five and sixteen have no common divisor: eighty looks of one colour.
const std::array<std::vector<int>, 5> kDashes{
    std::vector<int>{}, {7, 4}, {2, 3}, {7, 3, 2, 3}, {10, 3, 2, 3, 2, 3}};
constexpr std::array<std::string_view, 8> kShapes{"circle",        "square",        "triangle-up",
                                                  "diamond",       "triangle-down", "cross",
                                                  "triangle-left", "triangle-right"};

/// The nth look of one colour; `base` tells the markers of policies apart.
SeriesStyle look(std::string_view colour, std::size_t base, std::size_t nth) {
  return {colour, kDashes[nth % kDashes.size()], kShapes[(base + nth) % kShapes.size()],
          nth / kShapes.size() % 2 == 0};
}

/// References have no markers, as long as dashes tell them apart.
SeriesStyle reference_look(std::string_view policy, std::size_t nth) {
  const std::size_t first = policy == kOracleMass ? 1 : policy == kOracleTopk ? 2 : 3;
  SeriesStyle style = look("ink", 0, first + nth);
  if (nth < kDashes.size()) style.shape = "";
  return style;
}

/// Where a name that nobody knows beforehand begins to look for a colour.
std::size_t place_of(std::string_view name) {
  return std::accumulate(name.begin(), name.end(), std::size_t{0}, [](std::size_t sum, char c) {
    return 31 * sum + static_cast<unsigned char>(c);
  });
}

/// Colours by policy, of those that a page shows.
class Colours {
 public:
  std::string_view of(std::string_view policy) {
    if (const auto known = shelf().find(policy); known != shelf().end()) return known->second;
    const auto [own, added] = own_.try_emplace(policy);
    for (std::size_t i = place_of(policy); own->second.empty(); ++i)
      if (const std::string_view colour = kOwn[i % kOwn.size()];
          own_.size() > kOwn.size() || !is_taken(colour))
        own->second = colour;
    return own->second;
  }

 private:
  bool is_taken(std::string_view colour) const {
    return std::ranges::any_of(own_, [&](const auto& other) { return other.second == colour; });
  }

  std::map<std::string_view, std::string_view> own_;  // of policies that are not of the shelf
};

}  // namespace

std::span<const PageColour> page_colours() { return kColours; }

std::string_view light_of(std::string_view name) {
  for (const PageColour& colour : kColours)
    if (colour.name == name) return colour.light;
  throw std::out_of_range("no such page colour: " + std::string(name));
}

nlohmann::ordered_json style_json(const SeriesStyle& style) {
  return {{"colour", style.colour},
          {"dash", style.dash},
          {"shape", style.shape},
          {"filled", style.filled}};
}

std::vector<SeriesStyle> styles_of(std::span<const Series> series) {
  constexpr std::size_t kLooks = 80;
  Colours colours;
  std::vector<SeriesStyle> styles;
  for (const Series& entry : series) {
    SeriesStyle style;
    for (std::size_t nth = 0; nth < kLooks; ++nth) {
      style = entry.is_reference() ? reference_look(entry.policy, nth)
                                   : look(colours.of(entry.policy), place_of(entry.policy), nth);
      if (std::ranges::find(styles, style) == styles.end()) break;
    }
    styles.push_back(std::move(style));
  }
  return styles;
}

}  // namespace kvlab
