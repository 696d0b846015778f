#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/fidelity/fidelity.hpp"
#include "engine/evaluation/pages/pages.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxFidelityBytes = std::size_t{256} << 20;
constexpr std::size_t kMaxWrong = 5;  // most misordered pairs shown for a budget

constexpr const char* kFidelityFootnote =
    "Rho: Spearman’s rank correlation among the policies of one budget, averaged over texts; its "
    "95% interval is a bootstrap over texts. Regret: KL of the policy that the metric puts first, "
    "divided by the lowest KL.";
constexpr const char* kScatter =
    "Each point is a policy, averaged over texts. If a metric predicts KL, the points rise from "
    "left to right.";
constexpr const char* kWrong =
    "Pairs of policies that differ significantly in KL (paired block bootstrap, 95%) and that the "
    "metric puts in the opposite order, worst first. Ratio: KL of the policy that the metric "
    "prefers, divided by the KL of the other.";
constexpr const char* kCeiling =
    "The metric that predicts the order best comes first. The last row is KL on one text against "
    "KL on another: a metric measured on one text cannot be expected to do better.";

Cell rho_cell(const JsonFields& fields, const std::string& budget) {
  const double rho = fields.number_or_nan(budget);
  return std::isnan(rho) ? Cell("–") : Cell(fmt::format("{:.2f}", rho), rho);
}

std::string rho_text(const JsonFields& fields, const std::string& budget) {
  return fields.has(budget) ? fmt::format("{:.2f}", fields.number(budget)) : "–";
}

class FidelityPage {
 public:
  FidelityPage(const json& top, const std::string& file, const std::vector<ResultRow>& rows)
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

  std::string html() const {
    const std::string title =
        "Which metric predicts the end-to-end KL of " + fields_.text("model") + "?";
    nlohmann::ordered_json data;
    const std::string bytes = frontier_section(frontier(), data);
    const std::string drawn =
        figures_section(escape(standard_) + " against KL", kScatter, scatters(), data);
    return html_page("kvlab: " + title,
                     html_header("kvlab fidelity", escape(title), context(), answer(), "blue",
                                 kFidelityFootnote) +
                         bytes + metrics_table() + drawn + wrong() + provenance(),
                     data);
  }

  /// KL of the end-to-end evaluation against bytes; empty for older results, which have no bytes.
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

 private:
  JsonFields metric(const std::string& name) const {
    return fields_.object("metrics").object(name);
  }

  std::string context() const {
    return fmt::format(
        "{} policies at {} budgets over {} texts: metrics of an offline replay, against the KL to "
        "the full cache of an end-to-end evaluation.",
        metric_table_.series().size(), budgets_.size(), fields_.list("texts").size());
  }

  std::string answer() const {
    const JsonFields own = metric(standard_);
    std::vector<std::string> parts;
    double worst = 0;
    std::string worst_budget;
    for (const std::string& budget : budgets_) {
      parts.push_back(
          fmt::format("{} at {}", rho_text(own.object("within"), budget), escape(budget)));
      const JsonFields regret = own.object("regret");
      if (regret.has(budget) && regret.number(budget) > worst)
        worst = regret.number(budget), worst_budget = budget;
    }
    return fmt::format(
        "<code>kvlab deploy</code> chooses by <strong>{}</strong> here. It predicts the order of "
        "end-to-end KL with rank correlation {}. The policy that it puts first has at most {:.2f} "
        "times the lowest KL (at {}).",
        escape(standard_), join_names(parts), worst, escape(worst_budget));
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

  std::string metrics_table() const {
    std::vector<Column> columns{{"metric", false}};
    for (const std::string& budget : budgets_)
      columns.insert(columns.end(), {{"rho at " + escape(budget)}, {"from"}, {"to"}, {"regret"}});
    columns.push_back({"pooled"});
    std::vector<std::vector<Cell>> rows;
    for (const std::string& name : metrics_in_order()) {
      const JsonFields own = metric(name);
      std::vector<Cell> row{name == standard_ ? fmt::format("<strong>{}</strong>", escape(name))
                                              : escape(name)};
      for (const std::string& budget : budgets_)
        for (const char* part : {"within", "within_low", "within_high", "regret"})
          row.push_back(rho_cell(own.object(part), budget));
      row.push_back(rho_cell(own, "pooled"));
      rows.push_back(std::move(row));
    }
    std::vector<Cell> ceiling{"text against text"};
    for (const std::string& budget : budgets_) {
      ceiling.push_back(rho_cell(fields_.object("ceiling"), budget));
      ceiling.insert(ceiling.end(), 3, "");
    }
    ceiling.emplace_back("");
    rows.push_back(std::move(ceiling));
    return html_section("Within a budget", kCeiling, table(columns, rows));
  }

  std::string wrong() const {
    std::vector<std::vector<Cell>> rows;
    const JsonFields own = metric(standard_);
    for (const std::string& budget : budgets_) {
      const auto counted = [&](const char* key) { return own.object(key).whole(budget); };
      const JsonFields pairs = own.object("wrong");
      const json& list = pairs.list(budget);
      const auto add = [&](Cell preferred, Cell better, Cell ratio) {
        rows.push_back({escape(budget), std::to_string(counted("misordered")),
                        std::to_string(counted("significantly_different")), std::move(preferred),
                        std::move(better), std::move(ratio)});
      };
      if (list.empty()) add("", "", "");
      for (std::size_t i = 0; i < std::min(list.size(), kMaxWrong); ++i) {
        const JsonFields one(list[i], own.where() + ": wrong");
        add(escape(brief_policy(one.text("preferred"))), escape(brief_policy(one.text("better"))),
            number_cell(one.number("kl_ratio")));
      }
    }
    return html_section("Where " + escape(standard_) + " is wrong", kWrong,
                        table({{"budget"},
                               {"misordered pairs"},
                               {"of"},
                               {"prefers", false},
                               {"but lower KL has", false},
                               {"ratio"}},
                              rows));
  }

  /// The texts' lengths: one number if all are equal, else in the order of the texts.
  std::string tokens() const {
    const JsonFields all = fields_.object("tokens"), prompts = fields_.object("prompt_tokens");
    std::vector<std::string> lengths;
    for (const json& text : fields_.list("texts")) {
      const std::string name = text.is_string() ? text.get<std::string>() : "?";
      lengths.push_back(fmt::format("{}, {} of them prompt", all.whole(name), prompts.whole(name)));
    }
    if (std::ranges::adjacent_find(lengths, std::ranges::not_equal_to{}) == lengths.end())
      lengths.resize(std::min<std::size_t>(lengths.size(), 1));
    return fmt::format("{}", fmt::join(lengths, "; "));
  }

  std::string provenance() const {
    std::vector<std::string> texts;
    for (const json& text : fields_.list("texts"))
      texts.push_back(escape(text.is_string() ? text.get<std::string>() : "?"));
    std::string policies;
    for (const Series& series : metric_table_.series())
      policies += fmt::format("{}<code>{}{}{}</code>", policies.empty() ? "" : "<br>",
                              escape(series.policy), series.params.empty() ? "" : ":",
                              escape(series.params));
    return html_section(
        "Where this comes from", "",
        html_terms({{"weights", "<code>" + escape(fields_.text("weights_xxh3")) + "</code>"},
                    {"texts", join_names(texts)},
                    {"tokens", tokens()},
                    {"policies", policies},
                    {"kvlab", escape(fields_.text("kvlab"))}}));
  }

  JsonFields fields_;
  MetricTable metric_table_;
  std::vector<SeriesStyle> styles_;
  std::string standard_;
  std::vector<std::string> budgets_;
};

}  // namespace

namespace {

template <class Use>
auto with_page(const std::filesystem::path& folder, Use&& use) {
  const std::string file = (folder / kFidelityJson).string(),
                    csv = (folder / kFidelityCsv).string();
  const json top = parse_result_json(read_text_file(file, kMaxFidelityBytes), file);
  JsonFields(top, file).check_format(kFidelityFormat);
  const std::vector<ResultRow> rows = parse_score_rows(read_text_file(csv, kMaxFidelityBytes), csv);
  return use(FidelityPage(top, file, rows));
}

}  // namespace

std::string fidelity_page(const std::filesystem::path& folder) {
  return with_page(folder, [](const FidelityPage& page) { return page.html(); });
}

std::vector<Figure> fidelity_figures(const std::filesystem::path& folder) {
  return with_page(folder, [](const FidelityPage& page) {
    std::vector<Figure> figures = page.scatters();
    figures.insert(figures.begin(), page.frontier());
    return figures;
  });
}

}  // namespace kvlab
