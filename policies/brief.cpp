#include "policies/brief.hpp"

#include <algorithm>
#include <stdexcept>

#include "traces/base/text.hpp"

namespace kvlab {

std::string brief(const PolicySpec& spec) {
  if (!spec.entry) return spec.text();
  PolicySpec plain = spec;
  for (std::size_t i = 0; i < plain.params.size(); ++i)
    plain.params[i] = spec.entry->params[i].standard;
  plain.columns.assign(plain.columns.size(), "");
  plain.sinks = spec.entry->info.sinks;
  plain.recent = spec.entry->info.recent;
  plain.modifiers = spec.entry->info.modifiers;
  const auto defaults = split_list(plain.params_text(), ':');
  std::string text = spec.name;
  for (const std::string& setting : split_list(spec.params_text(), ':'))
    if (!setting.empty() && std::ranges::find(defaults, setting) == defaults.end())
      text += ":" + setting;
  return text;
}

std::string brief_policy(const std::string& text) {
  try {
    return brief(parse_policy(text));
  } catch (const std::invalid_argument&) {
    return text;
  }
}

}  // namespace kvlab
