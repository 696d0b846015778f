#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "engine/evaluation/copied_fields.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/policy_file.hpp"
#include "policies/catalogue.hpp"
#include "sim/report/recommendation.hpp"
#include "traces/base/json.hpp"
#include "traces/base/old_keys.hpp"

namespace kvlab {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::size_t kMaxDrawn = 8;  // so that the answer fits on one screen

constexpr CopiedField kTuneText[] = {
    {"name", FieldKind::text}, {"tokens", FieldKind::whole}, {"prompt_tokens", FieldKind::whole}};
constexpr CopiedField kTuneTask[] = {
    {"task", FieldKind::text}, {"words", FieldKind::whole}, {"samples", FieldKind::whole}};
constexpr CopiedField kTuneAnswers[] = {
    {"right", FieldKind::optional}, {"low", FieldKind::optional}, {"high", FieldKind::optional}};
constexpr CopiedField kTuneFinalist[] = {{"policy", FieldKind::policy},
                                         {"kl_over_lowest", FieldKind::optional}};
constexpr CopiedField kTuneScores[] = {
    {"policy", FieldKind::policy},       {"perplexity", FieldKind::optional},
    {"kl", FieldKind::optional},         {"kl_deviation", FieldKind::optional},
    {"same_first", FieldKind::optional}, {"tokens", FieldKind::optional}};
constexpr CopiedField kTuneStep[] = {{"deployed", FieldKind::number}, {"full", FieldKind::number}};

/// One policy in one round.
struct RoundEntry {
  std::string policy, status;
  double kl;
  Difference from_lowest;  ///< from the round's leader, in nats
};

Difference difference_in(const JsonFields& fields) {
  return {.mean = fields.number_or_nan("mean"),
          .interval = {fields.number_or_nan("low"), fields.number_or_nan("high")}};
}

class TunePage {
 public:
  TunePage(const json& top, const std::string& file) : file_(top, file), run_(file_.object("run")) {
    if (!run_.has("rounds") || run_.list("rounds").empty())
      throw std::runtime_error(
          file + ": holds no successive halving; it should be a policy file made by `kvlab tune`");
    for (const JsonFields& fields : run_.objects("rounds")) {
      rounds_.emplace_back();
      for (const JsonFields& one : fields.objects("ranking"))
        rounds_.back().push_back({one.text("policy"), one.text("status"), one.number("kl"),
                                  difference_in(one.object("from_lowest"))});
      if (rounds_.back().empty())
        throw std::runtime_error(fields.where() + ": ranking: empty; it should hold policies");
    }
    winner_ = winner(file);
  }

  PageDocument document() const {
    ordered_json data{
        {"kind", "tune"},
        {"facts",
         {{"model", file_.object("model").text("name")},
          {"budget", file_.whole("budget")},
          {"winner", {{"policy", brief_policy(winner_.policy)}, {"kl", winner_.kl}}},
          {"texts", copy_fields(run_.objects("texts"), kTuneText)},
          {"rounds", rounds_json()},
          {"ended", run_.text("ended")},
          {"criteria", run_.has("criteria") ? criteria_json() : ordered_json(nullptr)},
          {"scores", run_.has("scores") ? copy_fields(run_.objects("scores"), kTuneScores)
                                        : ordered_json(nullptr)},
          {"step", run_.has("step")
                       ? copy_fields(run_.object("step").object("milliseconds"), kTuneStep)
                       : ordered_json(nullptr)},
          {"offline", offline_json()},
          {"next", "kvlab generate --model DIR --prompt TEXT --policy-file policy.json"}}}};
    data["recommendations"] = ordered_json::array();
    std::string text;
    if (run_.has("recommendation")) {
      const Recommendation made = recommendation_in(run_, "recommendation");
      const auto no_colour = [](const std::string&) { return std::string(); };
      data["recommendations"].push_back(page_json({&made, 1}, no_colour));
      text = recommendations_text({&made, 1});
    }
    data["figures"] = ordered_json::array();
    add_figures(data, {difference_figure()});
    return {std::move(data), std::move(text)};
  }

 private:
  /// The deployed policy's entry in the last round that it ran.
  const RoundEntry& winner(const std::filesystem::path& file) const {
    std::string text = file_.text("policy");
    try {
      text = read_policy_file(file).cache.policy.text();
    } catch (const std::exception&) {  // the policy is a header that is not compiled here, so
                                       // search by its name
    }
    for (std::size_t round = rounds_.size();
         round-- > 0;)  // the deployed policy may have been eliminated early
      for (const RoundEntry& entry : rounds_[round])
        if ((entry.policy + ":").starts_with(text + ":")) return entry;
    return rounds_.back().front();
  }

  ordered_json rounds_json() const {
    ordered_json rounds = ordered_json::array();
    for (const auto& round : rounds_) {
      rounds.push_back(ordered_json::array());
      for (const RoundEntry& one : round)
        rounds.back().push_back({{"policy", brief_policy(one.policy)},
                                 {"status", one.status},
                                 {"kl", one.kl},
                                 {"from_lowest", difference_json(one.from_lowest)}});
    }
    return rounds;
  }

  /// The best policy by each criterion, the reason for the deployed one, and the finalists' task
  /// accuracy.
  ordered_json criteria_json() const {
    const JsonFields criteria = run_.object("criteria");
    const auto name = [&](const char* key) {
      return criteria.has(key) ? ordered_json(brief_policy(criteria.text(key)))
                               : ordered_json(nullptr);
    };
    ordered_json policies = ordered_json::array();
    for (const JsonFields& one : criteria.objects("policies")) {
      policies.push_back(copy_fields(one, kTuneFinalist));
      if (one.has("task_accuracy"))
        policies.back()["task_accuracy"] = copy_fields(one.objects("task_accuracy"), kTuneAnswers);
    }
    return {{"distribution", name("distribution")},
            {"task_accuracy", name("task_accuracy")},
            {"why", criteria.text("why")},
            {"evaluated", copy_fields(criteria.objects("evaluated"), kTuneTask)},
            {"policies", policies}};
  }

  ordered_json offline_json() const {
    const JsonFields offline = run_.object("offline_replay");
    const std::string metric = offline.text("metric");
    ordered_json ranking = ordered_json::array();
    for (const JsonFields& one : offline.objects("ranking"))
      ranking.push_back({{"policy", brief_policy(one.text("policy"))},
                         {"value", number_or_null(one.number_or_nan(metric))}});
    return {{"metric", metric}, {"ranking", ranking}};
  }

  Figure difference_figure() const {
    Figure figure{.name = "behind",
                  .title = fmt::format("budget {} tokens", file_.whole("budget")),
                  .x = {.title = "KL minus the leader’s, nats"},
                  .joined = false};
    std::vector<Series> series;
    const auto& last = rounds_.back();
    for (std::size_t i = 0; i < std::min(kMaxDrawn, last.size()); ++i)
      series.push_back({.policy = last[i].policy.substr(0, last[i].policy.find(':'))});
    const auto styles = styles_of(series);
    for (std::size_t i = 0; i < series.size(); ++i) {
      figure.y.names.push_back(brief_policy(last[i].policy));
      figure.series.push_back(
          {figure.y.names.back(),
           styles[i],
           {{.x = last[i].from_lowest.mean,
             .y = static_cast<double>(i),
             .x_low = last[i].from_lowest.interval.low,
             .x_high = last[i].from_lowest.interval.high,
             .note = last[i].from_lowest.significantly_different() ? "significant"
                                                                   : "not significant"}}});
    }
    return figure;
  }

  JsonFields file_, run_;
  std::vector<std::vector<RoundEntry>> rounds_;
  RoundEntry winner_;
};

}  // namespace

PageDocument tune_page(json top, const std::string& path) {
  rename_old_keys(top);
  return TunePage(top, path).document();
}

}  // namespace kvlab
