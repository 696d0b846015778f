#include "engine/loop/fidelity/page.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "engine/loop/eval/table.hpp"
#include "engine/loop/fidelity/table.hpp"
#include "sim/report/answer.hpp"
#include "sim/report/charts.hpp"
#include "sim/report/html.hpp"
#include "sim/report/page.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = std::size_t{256} << 20;
constexpr std::size_t kMostWrong = 5;  // cases a budget

constexpr const char* kFootnote =
    "Rho: Spearman’s rank correlation among the policies of one budget, means over texts; its 95% "
    "interval by a bootstrap over texts. Regret: KL of the policy that the figure puts first over "
    "the least KL.";
constexpr const char* kScatter =
    "Each point is a policy, the mean over texts. A figure that predicts makes a rising line.";
constexpr const char* kWrong =
    "Pairs of policies that KL tells apart (paired block bootstrap, 95%) and that the figure puts "
    "in "
    "the other order; the worst first. Ratio: KL of the one that the figure prefers over the "
    "other’s.";
constexpr const char* kCeiling =
    "KL on one text against KL on another: what a figure from one text cannot be expected to "
    "exceed.";

std::string rho_text(const JsonFields& fields, const std::string& budget) {
  return fields.has(budget) ? fmt::format("{:.2f}", fields.number(budget)) : "–";
}

class FidelityPage {
 public:
  FidelityPage(const json& top, const std::string& file, const std::vector<ResultRow>& rows)
      : fields_(top, file), figures_(rows), styles_(styles_of(figures_.series())) {
    standard_ = fields_.text("default_metric");
    if (!fields_.object("metrics").has(standard_))
      throw std::runtime_error(
          fmt::format("{}: metrics has no {}, its default_metric", file, json_quoted(standard_)));
    for (const auto& [budget, rho] : metric(standard_).object("within").json().items())
      budgets_.push_back(budget);
    std::ranges::stable_sort(budgets_, {}, [&](const std::string& budget) {
      const BudgetColumn* const column = figures_.find_budget(budget);
      return column ? column->least_tokens : 0;
    });
  }

  std::string html() const {
    const std::string title =
        "Which figure predicts the closed loop of " + fields_.text("model") + "?";
    return html_page("kvlab: " + title, html_header("kvlab fidelity", escape(title), context(),
                                                    answer(), "blue", kFootnote) +
                                            metrics_table() + scatters() + wrong() + provenance());
  }

 private:
  JsonFields metric(const std::string& name) const {
    return fields_.object("metrics").object(name);
  }

  std::string context() const {
    return fmt::format(
        "{} policies at {} budgets over {} texts: figures of a replay, beside the KL "
        "to the full cache when each policy really runs.",
        figures_.series().size(), budgets_.size(), fields_.list("texts").size());
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
        "<strong>{}</strong>, by which <code>kvlab deploy</code> goes here, orders policies as the "
        "closed loop does with rho {}. Going by it costs at most {:.2f} times the least KL (at "
        "{}).",
        escape(standard_), join_names(parts), worst, escape(worst_budget));
  }

  std::string cell(const JsonFields& own, const std::string& budget) const {
    const std::string interval =
        own.object("within_low").has(budget)
            ? fmt::format(" [{} to {}]", rho_text(own.object("within_low"), budget),
                          rho_text(own.object("within_high"), budget))
            : "";
    return fmt::format("{}{}<br>regret {}", rho_text(own.object("within"), budget), interval,
                       rho_text(own.object("regret"), budget));
  }

  std::string metrics_table() const {
    std::vector<Column> columns{{"figure", false}};
    for (const std::string& budget : budgets_) columns.push_back({escape(budget)});
    columns.push_back({"pooled"});
    std::vector<std::vector<std::string>> rows;
    const JsonFields metrics = fields_.object("metrics");
    for (const auto& [name, value] : metrics.json().items()) {
      const JsonFields own = metrics.object(name);
      std::vector<std::string> row{
          name == standard_ ? fmt::format("<strong>{}</strong>", escape(name)) : escape(name)};
      for (const std::string& budget : budgets_) row.push_back(cell(own, budget));
      row.push_back(rho_text(own, "pooled"));
      rows.push_back(std::move(row));
    }
    std::vector<std::string> ceiling{"text against text"};
    for (const std::string& budget : budgets_)
      ceiling.push_back(rho_text(fields_.object("ceiling"), budget));
    ceiling.emplace_back("");
    rows.push_back(std::move(ceiling));
    return html_section("Within a budget", kCeiling, table(columns, rows));
  }

  std::string scatter(const std::string& budget, std::size_t index) const {
    std::vector<ScatterPoint> points;
    for (std::size_t s = 0; s < figures_.series().size(); ++s) {
      const auto x = figures_.average(s, budget, standard_), y = figures_.average(s, budget, "kl");
      if (x && y) points.push_back({x->mean, y->mean, styles_[s]});
    }
    const std::string svg =
        scatter_chart(points, standard_, "KL, nats", fmt::format("scatter_{}", index));
    return svg.empty()
               ? ""
               : html_figure("budget " + escape(budget),
                             "rho " + rho_text(metric(standard_).object("within"), budget), svg);
  }

  std::string scatters() const {
    std::string html, legend;
    for (std::size_t b = 0; b < budgets_.size(); ++b) html += scatter(budgets_[b], b);
    for (std::size_t s = 0; s < figures_.series().size(); ++s)
      legend += (legend.empty() ? "" : ", ") + series_html(figures_, styles_, s);
    return html_section(escape(standard_) + " against KL",
                        std::string(kScatter) + "</p>\n<p class=\"prose\">" + legend, html,
                        "figures small");
  }

  std::string wrong() const {
    std::vector<std::vector<std::string>> rows;
    const JsonFields own = metric(standard_);
    for (const std::string& budget : budgets_) {
      const auto counted = [&](const char* key) { return own.object(key).whole(budget); };
      const JsonFields pairs = own.object("wrong");
      const json& list = pairs.list(budget);
      const std::string of = fmt::format("{} of {}", counted("misordered"), counted("told_apart"));
      if (list.empty()) rows.push_back({escape(budget), of, "", "", ""});
      for (std::size_t i = 0; i < std::min(list.size(), kMostWrong); ++i) {
        const JsonFields one(list[i], own.where() + ": wrong");
        rows.push_back({i ? "" : escape(budget), i ? "" : of, escape(one.text("preferred")),
                        escape(one.text("better")), fmt::format("{:.2f}", one.number("kl_ratio"))});
      }
    }
    return html_section(
        "Where " + escape(standard_) + " is wrong", kWrong,
        table(
            {{"budget"}, {"wrong pairs"}, {"prefers", false}, {"but better is", false}, {"ratio"}},
            rows));
  }

  /// Once for texts of one length, or else in the order of the texts.
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
    for (const Series& series : figures_.series())
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
  Figures figures_;
  std::vector<SeriesStyle> styles_;
  std::string standard_;
  std::vector<std::string> budgets_;
};

}  // namespace

std::string fidelity_page(const std::filesystem::path& folder) {
  const std::string file = (folder / kFidelityJson).string(),
                    csv = (folder / kFidelityCsv).string();
  const json top = parse_json(read_text_file(file, kMaxBytes), file);
  JsonFields(top, file).check_format(kFidelityFormat);
  const std::vector<ResultRow> rows = parse_score_rows(read_text_file(csv, kMaxBytes), csv);
  return FidelityPage(top, file, rows).html();
}

}  // namespace kvlab
