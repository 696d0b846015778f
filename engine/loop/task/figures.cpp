#include "engine/loop/task/figures.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "sim/run/csv.hpp"

namespace kvlab {
namespace {

constexpr double kDeviations = 1.959963984540054;  // of a normal distribution: 95%

/// The answers of one configuration and mode at some places, and the first configuration's.
struct Sample {
  std::vector<const TaskAnswer*> own, first;
};

class TaskFigures {
 public:
  explicit TaskFigures(TaskFigure place) : figure_(place) {}

  void add_all(const Sample& sample) {
    std::uint64_t right = 0, kept = 0, gained = 0, first_right = 0;
    std::vector<double> likelihood, change;
    for (std::size_t i = 0; i < sample.own.size(); ++i) {
      const TaskAnswer &own = *sample.own[i], &first = *sample.first[i];
      right += own.right;
      first_right += first.right;
      kept += own.right && first.right;
      gained += own.right && !first.right;
      likelihood.push_back(own.log_likelihood);
      change.push_back(own.log_likelihood - first.log_likelihood);
    }
    add_share("exact_match", right, sample.own.size());
    add_share("lost", first_right - kept, first_right);
    add_share("gained", gained, sample.own.size() - first_right);
    add_mean("log_likelihood", likelihood);
    add_mean("log_likelihood_change", change);
  }
  std::vector<TaskFigure> figures;

 private:
  void add(std::string_view metric, double value, Interval interval, std::uint64_t count) {
    figure_.metric = metric;
    figure_.value = value;
    figure_.interval = interval;
    figure_.count = count;
    figures.push_back(figure_);
  }
  void add_share(std::string_view metric, std::uint64_t hits, std::uint64_t count) {
    if (count == 0) return;
    add(metric, static_cast<double>(hits) / static_cast<double>(count),
        wilson_interval(hits, count), count);
  }
  void add_mean(std::string_view metric, const std::vector<double>& values) {
    if (values.empty()) return;
    PairedScores scores(1);
    const double sum = std::accumulate(values.begin(), values.end(), 0.0);
    scores.add(
        {.text = "draws", .means = {sum / static_cast<double>(values.size())}, .blocks = {values}});
    const Difference average = scores.average(0);
    add(metric, average.mean, average.interval, values.size());
  }

  TaskFigure figure_;
};

/// The different values of a member, ascending, behind "all".
template <class T, class Member>
std::vector<std::optional<T>> all_and_each(std::span<const TaskPlace> places, Member member) {
  std::vector<std::optional<T>> values{std::nullopt};
  for (const TaskPlace& place : places)
    if (std::ranges::find(values, std::optional<T>(place.*member)) == values.end())
      values.push_back(place.*member);
  std::ranges::sort(values);
  return values;
}

/// The columns that say which configuration.
std::string config_fields(const TaskRun& run, std::size_t c, QueryMode mode) {
  const CacheConfig& config = run.configs[c];
  return fmt::format("{},{},{},{},{},{},{},{}", csv_field(run.task), csv_field(config.policy.name),
                     csv_field(config.policy.params_text()), csv_field(config.budget_text()),
                     csv_field(config.prefill.text()), name_of(config.positions), config.seed,
                     name_of(mode));
}

std::string number_or_nothing(double value) {
  return std::isnan(value) ? "" : fmt::format("{}", value);
}

}  // namespace

Interval wilson_interval(std::uint64_t hits, std::uint64_t count) {
  if (count == 0) return {0, 1};
  const auto n = static_cast<double>(count), share = static_cast<double>(hits) / n;
  const double z2 = kDeviations * kDeviations;
  const double centre = (share + z2 / (2 * n)) / (1 + z2 / n);
  const double half =
      kDeviations / (1 + z2 / n) * std::sqrt(share * (1 - share) / n + z2 / (4 * n * n));
  return {hits == 0 ? 0 : centre - half, hits == count ? 1 : centre + half};
}

std::vector<TaskFigure> task_figures(std::span<const std::vector<std::vector<TaskAnswer>>> answers,
                                     std::span<const TaskPlace> places,
                                     std::span<const QueryMode> modes) {
  const auto all_words = all_and_each<std::uint32_t>(places, &TaskPlace::words);
  const auto all_depths = all_and_each<double>(places, &TaskPlace::depth);
  const std::size_t configs = answers.empty() ? 0 : answers[0][0].size();
  std::vector<TaskFigure> figures;
  for (std::size_t config = 0; config < configs; ++config)
    for (std::size_t mode = 0; mode < modes.size(); ++mode)
      for (const auto& words : all_words)
        for (const auto& depth : all_depths) {
          Sample sample;
          for (std::size_t p = 0; p < places.size(); ++p) {
            if (places[p].words != words.value_or(places[p].words) ||
                places[p].depth != depth.value_or(places[p].depth))
              continue;
            sample.own.push_back(&answers[p][mode][config]);
            sample.first.push_back(&answers[p][mode].front());
          }
          TaskFigures of_place({config, modes[mode], words, depth, "", 0, {0, 0}, 0});
          of_place.add_all(sample);
          figures.insert(figures.end(), of_place.figures.begin(), of_place.figures.end());
        }
  return figures;
}

std::string depth_text(double depth) { return fmt::format("{:.6g}%", 100 * depth); }

std::string task_figures_csv(const TaskRun& run, std::span<const TaskFigure> figures) {
  std::string text =
      "task,policy,params,budget,prefill,positions,seed,mode,words,depth,metric,value,low,high,"
      "count\n";
  for (const TaskFigure& figure : figures)
    text += fmt::format("{},{},{},{},{},{},{},{}\n", config_fields(run, figure.config, figure.mode),
                        figure.words ? std::to_string(*figure.words) : "all",
                        figure.depth ? depth_text(*figure.depth) : "all", figure.metric,
                        figure.value, number_or_nothing(figure.interval.low),
                        number_or_nothing(figure.interval.high), figure.count);
  return text;
}

std::string task_answers_csv(const TaskRun& run) {
  std::string text =
      "task,policy,params,budget,prefill,positions,seed,mode,words,depth,draw,expected,said,right,"
      "log_likelihood\n";
  for (std::size_t c = 0; c < run.configs.size(); ++c)
    for (std::size_t m = 0; m < run.modes.size(); ++m)
      for (std::size_t p = 0; p < run.prompts.size(); ++p) {
        const TaskAnswer& answer = run.answers[p][m][c];
        text += fmt::format("{},{},{},{},{},{},{},{}\n", config_fields(run, c, run.modes[m]),
                            run.places[p].words, depth_text(run.places[p].depth), run.draws[p],
                            fmt::join(run.prompts[p].expected, " "), csv_field(answer.said),
                            answer.right ? 1 : 0, answer.log_likelihood);
      }
  return text;
}

}  // namespace kvlab
