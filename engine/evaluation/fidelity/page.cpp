#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/evaluation/copied_fields.hpp"
#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/pages.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kMaxFidelityBytes = std::size_t{256} << 20;

constexpr CopiedField kFidelityFields[] = {
    {"model", FieldKind::text}, {"weights_xxh3", FieldKind::text}, {"kvlab", FieldKind::text}};
constexpr CopiedField kWrongPair[] = {{"preferred", FieldKind::policy},
                                      {"better", FieldKind::policy},
                                      {"kl_ratio", FieldKind::number}};

std::string rho_text(const JsonFields& fields, const std::string& budget) {
  return fields.has(budget) ? fmt::format("{:.2f}", fields.number(budget)) : "–";
}

class PageMaker {
 public:
  PageMaker(const json& top, const std::string& file, const std::vector<ResultRow>& rows)
      : fields_(top, file), metric_table_(rows), styles_(styles_of(metric_table_.series())) {
    standard_ = fields_.text("default_metric");
    if (!fields_.object("metrics").has(standard_))
      throw std::runtime_error(
          fmt::format("{}: metrics has no {}, its default_metric", file, json_quoted(standard_)));
    const auto within = metric(standard_).object("within");
    for (const auto& [budget, rho] : within.json().items()) budgets_.push_back(budget);
    std::ranges::stable_sort(budgets_, {}, [&](const std::string& budget) {
      const BudgetColumn* const column = metric_table_.find_budget(budget);
      return column ? column->min_tokens : 0;
    });
  }

  PageDocument document() const {
    ordered_json data{{"kind", "fidelity"}, {"facts", copy_fields(fields_, kFidelityFields)}};
    ordered_json metrics = ordered_json::array(), ceiling = metrics, policies = metrics;
    for (const std::string& name : metrics_in_order()) metrics.push_back(metric_json(name));
    for (const std::string& budget : budgets_)
      ceiling.push_back(number_or_null(fields_.object("ceiling").number_or_nan(budget)));
    for (const Series& series : metric_table_.series())
      policies.push_back(series.policy + (series.params.empty() ? "" : ":") + series.params);
    data["facts"].update({{"standard", standard_},
                          {"budgets", budgets_},
                          {"metrics", metrics},
                          {"ceiling", ceiling},
                          {"texts", texts_json()},
                          {"policies", policies}});
    data["figures"] = ordered_json::array();
    add_figures(data, figures());
    return {std::move(data), ""};
  }

  /// KL against bytes, then KL against the deciding metric at each budget.
  std::vector<Figure> figures() const {
    std::vector<Figure> found = scatters();
    found.insert(found.begin(), frontier());
    return found;
  }

 private:
  JsonFields metric(const std::string& name) const {
    return fields_.object("metrics").object(name);
  }

  /// The figure has no series for older results, because these do not contain bytes.
  Figure frontier() const {
    std::vector<std::size_t> all(metric_table_.series().size());
    std::iota(all.begin(), all.end(), std::size_t{0});
    return frontier_figure(metric_table_, all, {"kl", "KL to the full cache, nats", false, true});
  }

  /// KL against the deciding metric, at each budget.
  std::vector<Figure> scatters() const {
    const MetricInfo* const known = find_metric(standard_);
    std::vector<Figure> found;
    for (const std::string& budget : budgets_) {
      Figure figure{
          .name = fmt::format("{}_against_kl_{}", standard_, found.size()),
          .title = fmt::format("budget {}, rho {}", budget,
                               rho_text(metric(standard_).object("within"), budget)),
          .x = {.title = known ? std::string(known->label) : standard_, .logarithmic = true},
          .y = {.title = "KL to the full cache, nats", .logarithmic = true},
          .joined = false};
      for (std::size_t s = 0; s < metric_table_.series().size(); ++s) {
        const auto x = metric_table_.average(s, budget, standard_),
                   y = metric_table_.average(s, budget, "kl");
        if (x && y && x->mean > 0 && y->mean > 0)
          figure.series.push_back(
              {metric_table_.series()[s].label, styles_[s], {{.x = x->mean, .y = y->mean}}});
      }
      found.push_back(std::move(figure));
    }
    return found;
  }

  /// The metrics, best predictor first.
  std::vector<std::string> metrics_in_order() const {
    const JsonFields metrics = fields_.object("metrics");
    std::vector<std::pair<double, std::string>> found;
    for (const auto& [name, value] : metrics.json().items()) {
      double sum = 0;
      for (const std::string& budget : budgets_) {
        const double rho = metrics.object(name).object("within").number_or_nan(budget);
        sum += std::isnan(rho) ? 0 : rho;
      }
      found.emplace_back(-sum, name);
    }
    std::ranges::sort(found);
    std::vector<std::string> names;
    for (auto& [sum, name] : found) names.push_back(std::move(name));
    return names;
  }

  /// How well a metric predicts, at each budget.
  ordered_json metric_json(const std::string& name) const {
    const JsonFields own = metric(name);
    ordered_json budgets = ordered_json::array();
    for (const std::string& budget : budgets_) {
      const auto number = [&](const char* key) {
        return number_or_null(own.object(key).number_or_nan(budget));
      };
      budgets.push_back({{"within", number("within")},
                         {"low", number("within_low")},
                         {"high", number("within_high")},
                         {"regret", number("regret")}});
      if (name == standard_) budgets.back().update(wrong_json(own, budget));
    }
    return {{"name", name},
            {"budgets", budgets},
            {"pooled", number_or_null(own.number_or_nan("pooled"))}};
  }

  /// The pairs that the deciding metric puts in the wrong order at a budget.
  static ordered_json wrong_json(const JsonFields& own, const std::string& budget) {
    const JsonFields pairs = own.object("wrong");
    ordered_json wrong = ordered_json::array();
    for (const JsonFields& pair : pairs.objects(budget))
      wrong.push_back(copy_fields(pair, kWrongPair));
    return {{"misordered", own.object("misordered").whole(budget)},
            {"significantly_different", own.object("significantly_different").whole(budget)},
            {"wrong", wrong}};
  }

  ordered_json texts_json() const {
    const JsonFields all = fields_.object("tokens"), prompts = fields_.object("prompt_tokens");
    ordered_json texts = ordered_json::array();
    for (const json& text : fields_.list("texts")) {
      const std::string name = text.is_string() ? text.get<std::string>() : "?";
      texts.push_back(
          {{"name", name}, {"tokens", all.whole(name)}, {"prompt_tokens", prompts.whole(name)}});
    }
    return texts;
  }

  JsonFields fields_;
  MetricTable metric_table_;
  std::vector<SeriesStyle> styles_;
  std::string standard_;
  std::vector<std::string> budgets_;
};

}  // namespace

FidelityPage fidelity_page(const std::filesystem::path& folder) {
  const std::string file = (folder / kFidelityJson).string(),
                    csv = (folder / kFidelityCsv).string();
  const json top = parse_result_json(read_text_file(file, kMaxFidelityBytes), file);
  JsonFields(top, file).check_format(kFidelityFormat);
  const std::vector<ResultRow> rows = parse_score_rows(read_text_file(csv, kMaxFidelityBytes), csv);
  const PageMaker maker(top, file, rows);
  return {maker.document(), maker.figures()};
}

}  // namespace kvlab
