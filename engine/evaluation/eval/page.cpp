#include <fmt/format.h>

#include "engine/evaluation/copied_fields.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr CopiedField kEvalFields[] = {{"model", FieldKind::text},
                                       {"tokens", FieldKind::whole},
                                       {"queries", FieldKind::text},
                                       {"weights_xxh3", FieldKind::text},
                                       {"kvlab", FieldKind::text}};
constexpr CopiedField kEvalConfiguration[] = {{"policy", FieldKind::text},
                                              {"budget", FieldKind::text},
                                              {"positions", FieldKind::text},
                                              {"perplexity", FieldKind::optional},
                                              {"kl", FieldKind::optional},
                                              {"kl_p50", FieldKind::optional},
                                              {"kl_p90", FieldKind::optional},
                                              {"kl_p99", FieldKind::optional},
                                              {"kl_deviation", FieldKind::optional},
                                              {"top1_agreement", FieldKind::optional},
                                              {"acceptance", FieldKind::optional},
                                              {"tokens_per_verification", FieldKind::optional},
                                              {"kv_bytes_mean", FieldKind::optional},
                                              {"kv_bytes_peak", FieldKind::number}};

ordered_json texts_in(const json& list) {
  ordered_json texts = ordered_json::array();
  for (const json& text : list) texts.push_back(text.is_string() ? text.get<std::string>() : "?");
  return texts;
}

ordered_json configurations_in(const JsonFields& fields) {
  ordered_json list = ordered_json::array();
  for (const JsonFields& one : fields.objects("configurations")) {
    list.push_back(copy_fields(one, kEvalConfiguration));
    const std::string params = one.text("params");
    list.back()["label"] = brief_policy(one.text("policy") + (params.empty() ? "" : ":") + params);
  }
  return list;
}

/// The command to run next, for the choice at the decisive budget. `draft`: number of tokens that
/// the choice drafts; 0: it does not draft.
std::string next_after_eval(const std::vector<Recommendation>& made, std::uint32_t draft) {
  if (made.empty()) return "";
  const Recommendation& decisive = made[decisive_budget(made)];
  const std::string &policy = decisive.chosen_candidate().name, &budget = decisive.scope.budget;
  const std::string command = "kvlab generate --model DIR --prompt TEXT";
  return draft > 0 ? fmt::format("{} --draft-policy {} --draft-budget {} --gamma {}", command,
                                 policy, budget, draft)
                   : fmt::format("{} --policy {} --budget {}", command, policy, budget);
}

}  // namespace

PageDocument eval_page(const ScoreSet& scores) {
  const JsonFields fields(*scores.file, scores.path);
  ordered_json data = explorer_data(scores);
  data["kind"] = "eval";
  data["facts"] = copy_fields(fields, kEvalFields);
  const std::uint32_t draft = fields.has("draft") ? fields.whole32("draft") : 0;
  if (draft > 0) data["facts"]["draft"] = draft;
  data["facts"].update({{"texts", texts_in(fields.list("texts"))},
                        {"configurations", configurations_in(fields)},
                        {"has_recommendations", fields.has("recommendations")},
                        {"next", next_after_eval(scores.recommendations, draft)}});
  if (fields.has("recommendations")) data["facts"]["warnings"] = texts_in(fields.list("warnings"));
  return {std::move(data), recommendations_text(scores.recommendations)};
}

}  // namespace kvlab
