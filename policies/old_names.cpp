#include "policies/old_names.hpp"

namespace kvlab {
std::string current_params(std::string_view params) {
  std::string text;
  for (std::size_t at = 0; at <= params.size();) {
    const std::size_t end = std::min(params.find(':', at), params.size());
    const std::string_view setting = params.substr(at, end - at);
    const std::size_t key = std::min(setting.find('='), setting.size());
    if (at > 0) text += ':';
    text += current_name(kOldSettings, setting.substr(0, key));
    text += setting.substr(key);
    at = end + 1;
  }
  return text;
}

std::string current_policy(std::string_view policy) {
  const std::size_t name = std::min(policy.find(':'), policy.size());
  const std::size_t base = std::min(policy.find('*'), name);
  std::string text(current_name(kOldPolicies, policy.substr(0, base)));
  text += policy.substr(base, name - base);
  if (name == policy.size()) return text;
  text += ':';
  text += current_params(policy.substr(name + 1));
  return text;
}

std::string current_metric(std::string_view metric) {
  const std::size_t end = std::min(metric.find(':'), metric.size());
  return std::string(current_name(kOldMetrics, metric.substr(0, end))) +
         std::string(metric.substr(end));
}

}  // namespace kvlab
