#include "engine/loop/task/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>

#include "sim/head_view.hpp"

namespace kvlab {
namespace {

Memory memory_of(const CacheConfig& asked, const TaskPrompt& prompt, QueryMode mode,
                 const CacheShape& model) {
  std::vector<Segment> segments;
  std::uint32_t start = 0;
  const auto add = [&](std::size_t tokens, SegmentKind kind) {
    segments.push_back({start, static_cast<std::uint32_t>(tokens), kind});
    start += segments.back().tokens;
  };
  for (const auto& segment : prompt.segments(mode)) add(segment.size(), SegmentKind::prompt);
  add(prompt.answer.size(), SegmentKind::decode);
  CacheConfig config = asked;
  // (Of the prompt, without the answer.)
  config.budget = config.budget.at_length(prompt.tokens(), model.head_size);
  return kvlab::memory_of(resolve(config, segments, 0, model), model);
}

/// Whether each draw was answered right, of one mode: [configuration][prompt].
PairedScores right_answers(const TaskRun& run, std::size_t mode) {
  PairedText draws{.text = "draws", .answers = true};
  for (std::size_t c = 0; c < run.configs.size(); ++c) {
    double right = 0;
    auto& own = draws.blocks.emplace_back();
    for (const auto& prompt : run.answers) right += own.emplace_back(prompt[mode][c].right);
    draws.means.push_back(right / static_cast<double>(own.size()));
  }
  PairedScores scores(run.configs.size());
  scores.add(std::move(draws));
  return scores;
}

void add_contender(TaskVerdict& task, const TaskRun& run, std::size_t mode, std::size_t c,
                   const PairedScores& right) {
  const PolicySpec& policy = run.configs[c].policy;
  task.configs.push_back(c);
  task.contenders.push_back({.name = policy.text(),
                             .error = 1 - right.mean(c),
                             .memory = run.memory.empty() ? Memory{} : run.memory[mode][c],
                             .last_resort = is_last_resort(policy.name)});
  task.scope.budget_bytes = std::max(task.scope.budget_bytes, task.contenders.back().memory.budget);
}

void check_context(const ModelConfig& config, const TaskRun& run) {
  for (std::size_t p = 0; p < run.prompts.size(); ++p) {
    const TaskPrompt& prompt = run.prompts[p];
    const std::size_t tokens = prompt.tokens() + prompt.answer.size();
    if (tokens > config.trained_context)
      throw std::invalid_argument(
          fmt::format("--words {}: needs {} positions; {} was trained on {}, so fewer words would "
                      "fit; --beyond-context asks all the same",
                      run.places[p].words, tokens, config.name, config.trained_context));
  }
}

}  // namespace

std::vector<std::vector<Memory>> task_memory(const TaskRun& run, const CacheShape& model) {
  std::vector<std::vector<Memory>> memory(run.modes.size(),
                                          std::vector<Memory>(run.configs.size()));
  const auto prompts = static_cast<double>(run.prompts.size());
  for (std::size_t m = 0; m < run.modes.size(); ++m)
    for (std::size_t c = 0; c < run.configs.size(); ++c)
      for (const TaskPrompt& prompt : run.prompts) {
        const Memory own = memory_of(run.configs[c], prompt, run.modes[m], model);
        Memory& all = memory[m][c];
        all.mean += own.mean / prompts;
        all.peak = std::max(all.peak, own.peak);
        all.state = std::max(all.state, own.state);
        all.budget = std::max(all.budget, own.budget);
        all.span_mean += own.span_mean / prompts;
        all.span_peak = std::max(all.span_peak, own.span_peak);
      }
  return memory;
}

std::vector<TaskFigure> memory_figures(const TaskRun& run) {
  std::vector<TaskFigure> figures;
  for (std::size_t m = 0; m < run.memory.size(); ++m)
    for (std::size_t c = 0; c < run.configs.size(); ++c) {
      const Memory& memory = run.memory[m][c];
      for (const auto& [metric, value] :
           {std::pair("kv_bytes_mean", memory.mean), std::pair("kv_bytes_peak", memory.peak),
            std::pair("state_bytes", memory.state), std::pair("budget_bytes", memory.budget),
            std::pair("span_bytes_mean", memory.span_mean),
            std::pair("span_bytes_peak", memory.span_peak)})
        if (value > 0 || !std::string_view(metric).starts_with("span"))
          figures.push_back({c, run.modes[m], {}, {}, metric, value, {}, run.prompts.size()});
    }
  return figures;
}

std::vector<TaskVerdict> task_verdicts(const TaskRun& run, std::size_t mode) {
  const PairedScores right = right_answers(run, mode);
  std::vector<TaskVerdict> verdicts;
  for (std::size_t c = 0; c < run.configs.size(); ++c) {
    if (!run.configs[c].evicts()) continue;
    const std::string budget = run.configs[c].budget_text();
    auto own = std::ranges::find(verdicts, budget, &TaskVerdict::budget);
    if (own == verdicts.end())
      own = verdicts.insert(
          own,
          {.budget = budget,
           .scope = {.budget = budget, .figure = "right answers", .draws = run.prompts.size()}});
    add_contender(*own, run, mode, c, right);
  }
  for (TaskVerdict& task : verdicts)
    task.verdict = verdict_of(task.contenders, task.scope.budget_bytes,
                              [&](std::size_t a, std::size_t b) {  // of errors: wrong answers
                                return right.difference(task.configs[b], task.configs[a]);
                              });
  return verdicts;
}

TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request) {
  TaskRun run{.task = request.spec.text(),
              .configs = with_full_first(request.configs),
              .modes = request.modes};
  const Haystack haystack(request.text);
  for (const std::uint32_t words : request.words)
    for (const double depth : request.depths)
      for (std::uint32_t draw = request.first_draw; draw < request.draws; ++draw) {
        const TaskPlace place{words, depth};
        run.places.push_back(place);
        run.draws.push_back(draw);
        run.prompts.push_back(encode_task(
            tokenizer, request.chat, draw_task(request.spec, haystack, place, request.seed, draw)));
      }
  if (!request.beyond_context) check_context(backend.config(), run);
  run.answers = answer_tasks(backend.batches(), tokenizer, run.prompts, run.modes, run.configs,
                             request.answers);
  run.memory = task_memory(run, backend.config().heads());
  return run;
}

}  // namespace kvlab
