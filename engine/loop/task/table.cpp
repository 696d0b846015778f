#include "engine/loop/task/table.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "sim/run/csv.hpp"

namespace kvlab {
namespace {

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
