#include "engine/loop/task/capture.hpp"

#include <fmt/format.h>

#include "engine/output_sketch.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

namespace fs = std::filesystem;

void capture_one(Backend& backend, const fs::path& path, TraceHeader header,
                 const OutputSketch& sketch, const TaskPrompt& prompt, QueryMode mode) {
  TraceWriter writer(path, std::move(header));
  writer.sketch(sketch);
  const auto tokens = static_cast<std::uint32_t>(prompt.tokens() + prompt.answer.size());
  const auto decoder = backend.capturing_decoder(ResolvedConfig{}, tokens, writer, {});
  for (const auto& segment : prompt.segments(mode)) decoder->feed(segment, SegmentKind::prompt);
  decoder->feed(prompt.answer, SegmentKind::decode);
  decoder->flush();
  writer.finish();
}

}  // namespace

std::vector<NamedSpan> answer_spans(const Tokenizer& tokenizer, const TaskPrompt& prompt) {
  std::vector<NamedSpan> spans;
  for (const std::string& text : prompt.evidence) {
    const TokenRange range = covering_tokens(tokenizer, prompt.context, text);
    const std::string name = prompt.evidence.size() == 1
                                 ? std::string("answer")
                                 : fmt::format("answer {}", spans.size() + 1);
    spans.push_back({name, range.start, range.tokens});
  }
  return spans;
}

std::string task_trace_name(const TaskRun& run, std::size_t prompt, QueryMode mode) {
  return fmt::format("{}-{}-{}-{}", run.places[prompt].words, depth_text(run.places[prompt].depth),
                     run.draws[prompt], name_of(mode));
}

void capture_tasks(Backend& backend, const Tokenizer& tokenizer, const fs::path& model,
                   const TaskRun& run, const AtomicFolder& folder, unsigned threads,
                   const std::function<void(double)>& progress) {
  const OutputSketch sketch = output_sketch(model, kSketchSeed, threads);
  for (std::size_t p = 0; p < run.prompts.size(); ++p) {
    for (const QueryMode mode : run.modes) {
      TraceHeader header = backend.trace_header({{"task", run.task},
                                                 {"mode", name_of(mode)},
                                                 {"words", run.places[p].words},
                                                 {"depth", run.places[p].depth},
                                                 {"draw", run.draws[p]}});
      header.spans = answer_spans(tokenizer, run.prompts[p]);
      capture_one(backend, folder / task_trace_name(run, p, mode), std::move(header), sketch,
                  run.prompts[p], mode);
    }
    if (progress) progress(static_cast<double>(p + 1) / static_cast<double>(run.prompts.size()));
  }
}

}  // namespace kvlab
