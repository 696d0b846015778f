#include <fmt/format.h>

#include "engine/evaluation/copied_fields.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr CopiedField kTaskFields[] = {
    {"model", FieldKind::text}, {"task", FieldKind::text},         {"samples", FieldKind::whole},
    {"seed", FieldKind::whole}, {"weights_xxh3", FieldKind::text}, {"kvlab", FieldKind::text}};

std::string next_after_task(const std::vector<Recommendation>& made) {
  if (made.empty()) return "";
  const Recommendation& one = made[decisive_budget(made)];
  return fmt::format("kvlab eval --model DIR --text FILE... --policy {} --budget {}",
                     one.chosen_candidate().name, one.scope.budget);
}

}  // namespace

PageDocument task_page(const ScoreSet& scores) {
  const JsonFields fields(*scores.file, scores.path);
  const auto made = recommendations_for(scores, scores.metrics.front());
  ordered_json data = explorer_data(scores);
  data["kind"] = "task";
  data["facts"] = copy_fields(fields, kTaskFields);
  data["facts"].update({{"depths", fields.list("depths").size()},
                        {"lengths", fields.list("words").size()},
                        {"next", next_after_task(made)}});
  return {std::move(data), recommendations_text(made)};
}

}  // namespace kvlab
