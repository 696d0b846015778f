#include "sim/report/describe_policy.hpp"

#include <stdexcept>

#include "policies/executor.hpp"
#include "policies/modifiers/text.hpp"
#include "traces/base/json.hpp"

namespace kvlab {

using nlohmann::ordered_json;

namespace {

/// Whether decoders can compute all token features that the policy reads.
bool decodes(const PolicyInfo& info) {
  PolicySpec spec;
  for (const std::string& feature : features_of(info))
    spec.features.push_back(feature.substr(feature.find('=') + 1));
  return feature_beyond(kDecoder, spec).empty();
}

}  // namespace

std::string_view name_of(Needs needs) {
  switch (needs) {
    case Needs::nothing:
      return "nothing";
    case Needs::mass:
      return "mass";
    case Needs::requests:
      return "requests";
    case Needs::both:
      return "mass, requests";
  }
  throw std::logic_error("the policy's needs are unknown");
}

std::vector<std::string> features_of(const PolicyInfo& info) {
  return {info.features, info.features + info.feature_count()};
}

std::string_view name_of(Order order) { return order == Order::nested ? "nested" : "feedback"; }

ordered_json describe_policy(const PolicyEntry& entry) {
  const PolicyInfo& info = entry.info;
  ordered_json params = ordered_json::array();
  for (const ParamInfo& param : entry.params)
    params.push_back({{"name", std::string(param.name)},
                      {"help", std::string(param.help)},
                      {"default", param.standard},
                      {"least", param.min_value},
                      {"most", param.max_value}});
  return {{"name", info.name},
          {"summary", info.summary},
          {"evicts", info.evicts},
          {"needs", name_of(info.needs)},
          {"features", features_of(info)},
          {"decodes", decodes(info)},
          {"order", name_of(info.order)},
          {"weighted", info.weighted},
          {"sinks", text_of(info.sinks)},
          {"recent", text_of(info.recent)},
          {"modifiers", modifier_texts(info.modifiers, {})},
          {"params", params},
          {"positions", name_of(info.positions)},
          {"slot_bytes", entry.slot_bytes},
          {"token_bytes", entry.token_bytes()},
          {"citation", info.citation}};
}

}  // namespace kvlab
