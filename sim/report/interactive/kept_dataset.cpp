#include "sim/report/interactive/kept_dataset.hpp"

#include <fmt/format.h>

#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

ordered_json lives_of(const KeptSeries& series) {
  ordered_json flat = ordered_json::array();
  for (const Lifetime& life : series.lifetimes)
    for (const std::uint32_t number : {life.position, life.first_query, life.last_query})
      flat.push_back(number);
  return flat;
}

ordered_json attention_of(const KeptHead& head) {
  ordered_json rows = ordered_json::array();
  for (const auto& row : head.attention) {
    ordered_json flat = ordered_json::array();
    for (const Glance& glance : row) {
      flat.push_back(glance.position);
      flat.push_back(glance.level);
    }
    rows.push_back(std::move(flat));
  }
  return rows;
}

}  // namespace

ordered_json kept_dataset(const Kept& kept, const std::vector<std::string>& tokens,
                          const std::function<KeptLook(const KeptSeries&)>& look) {
  ordered_json texts = tokens, heads = ordered_json::array();
  if (tokens.empty())
    for (const std::int32_t id : kept.ids) texts.push_back(fmt::format("{} ", id));
  for (const KeptHead& head : kept.heads) {
    ordered_json series = ordered_json::array();
    for (const KeptSeries& one : head.series) {
      const auto [label, colour] = look(one);
      series.push_back({{"label", label}, {"colour", colour}, {"lives", lives_of(one)}});
    }
    heads.push_back({{"layer", head.layer},
                     {"head", head.head},
                     {"series", series},
                     {"attention", attention_of(head)}});
  }
  return {{"trace", kept.trace},     {"budget", kept.budget}, {"has_text", !tokens.empty()},
          {"queries", kept.queries}, {"tokens", texts},       {"heads", heads}};
}

}  // namespace kvlab
