#include "engine/loop/task/run.hpp"

#include "engine/loop/task/verdicts.hpp"

#include <fmt/format.h>

#include <stdexcept>

namespace kvlab {
namespace {

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

TaskRun run_task(Backend& backend, const Tokenizer& tokenizer, const TaskRequest& request) {
  TaskRun run{.task = request.spec.text(),
              .configs = with_full_first(request.configs),
              .modes = request.modes,
              .places = {},
              .draws = {},
              .prompts = {},
              .answers = {},
              .memory = {}};
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
