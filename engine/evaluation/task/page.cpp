#include <fmt/format.h>

#include "engine/evaluation/copied_fields.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::ordered_json;

constexpr std::size_t kMaxTaskBytes = std::size_t{256} << 20;

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

PageDocument task_page(const std::filesystem::path& folder) {
  const ScoreSet set = load_scores(folder);
  const std::string file = (folder / kTaskJson).string();
  const nlohmann::json top = parse_result_json(read_text_file(file, kMaxTaskBytes), file);
  const JsonFields fields(top, file);
  const auto made = recommendations_for(set, set.metrics.front());
  ordered_json data = explorer_data(set);
  data["kind"] = "task";
  data["facts"] = copied(fields, kTaskFields);
  data["facts"].update({{"depths", fields.list("depths").size()},
                        {"lengths", fields.list("words").size()},
                        {"next", next_after_task(made)}});
  return {std::move(data), recommendations_text(made)};
}

}  // namespace kvlab
