#include "traces/base/old_keys.hpp"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

struct OldKey {
  std::string_view before, now;
};

constexpr OldKey kOldKeys[] = {{"asked", "evaluated"},
                               {"behind", "from_lowest"},
                               {"draws", "samples"},
                               {"fate", "status"},
                               {"grid", "sweep"},
                               {"guards", "protected"},
                               {"holds_more", "over_budget"},  // old name
                               {"kl_of_least", "kl_over_lowest"},
                               {"ladder", "tiers"},  // old name
                               {"open_loop", "offline_replay"},
                               {"span", "queries"},
                               {"span_bytes_mean", "window_bytes_mean"},
                               {"span_bytes_peak", "window_bytes_peak"},
                               {"span_layers", "window_layers"},
                               {"standings", "ranking"},
                               {"ties", "not_significantly_different"},
                               {"ties_with_first", "not_significantly_different"},
                               {"told_apart", "significantly_different"},  // old name
                               {"truths", "criteria"}};

/// Renames the key "answers" to "task_accuracy" within `criteria`, where it was a criterion.
/// Elsewhere "answers" are the texts that a model generated, and keep their name.
void rename_answers(json& criteria) {
  const auto rename = [](json& object) {
    if (!object.is_object() || !object.contains("answers") || object.contains("task_accuracy"))
      return;
    object["task_accuracy"] = std::move(object["answers"]);
    object.erase("answers");
  };
  rename(criteria);
  if (!criteria.is_object() || !criteria.contains("policies")) return;
  for (json& policy : criteria["policies"]) rename(policy);
}

/// Renames settings and oracles in the text of a policy to their current names, as in
/// `h2o:tiers=4`. The time is linear in the length of `text`, because the text is not trusted.
void rename_text(std::string& text) {
  constexpr std::string_view kBefore = "ladder=", kNow = "tiers=";  // old name
  if (text == "oracle_mass") text = "oracle_attention";             // old name
  if (text.find(kBefore) == std::string::npos) return;
  std::string now;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t found = std::min(text.find(kBefore, at), text.size());
    now.append(text, at, found - at);
    at = found;
    if (at == text.size()) break;
    const bool is_setting = at == 0 || text[at - 1] == ':';
    now += is_setting ? kNow : kBefore;
    at += kBefore.size();
  }
  text = std::move(now);
}

}  // namespace

void rename_old_keys(json& top) {
  std::vector<json*> waiting{&top};
  while (!waiting.empty()) {
    json& one = *waiting.back();
    waiting.pop_back();
    if (one.is_object())
      for (const auto& [before, now] : kOldKeys) {
        const auto found = one.find(before);
        if (found == one.end() || one.contains(now)) continue;
        json value = std::move(*found);
        one.erase(found);
        one[std::string(now)] = std::move(value);
      }
    if (!one.is_structured()) continue;
    for (auto child = one.begin(); child != one.end(); ++child) {
      if (one.is_object() && child.key() == "capture") continue;
      if (one.is_object() && child.key() == "criteria") rename_answers(*child);
      if (child->is_string()) rename_text(child->get_ref<std::string&>());
      if (child->is_structured()) waiting.push_back(&*child);
    }
  }
}

json parse_result_json(std::string_view text, std::string_view what) {
  json top = parse_json(text, what);
  rename_old_keys(top);
  return top;
}

}  // namespace kvlab
