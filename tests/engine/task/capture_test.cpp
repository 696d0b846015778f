// Tests of the traces of questions, and of the passages that mark the tokens of the answer.
#include "engine/evaluation/task/answers.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "engine/evaluation/task/run.hpp"
#include "tests/catch.hpp"
#include "tests/engine/tiny.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

TEST_CASE("The answer's passage has the tokens of its evidence, for every kind of question") {
  const Tokenizer tokenizer = Tokenizer::load(kTinyModel + "/tokenizer.json");
  const Haystack text(bundled_haystack());
  for (const TaskSpec& spec :
       {TaskSpec{}, TaskSpec{.kind = TaskKind::needle, .keys = 3},
        TaskSpec{.kind = TaskKind::needle, .values = 3}, TaskSpec{.kind = TaskKind::recall},
        TaskSpec{.kind = TaskKind::recall, .reassigned = true}})
    for (const double depth : {0.0, 0.4, 1.0}) {
      CAPTURE(spec.text(), depth);
      const TaskSample sample = sample_task(spec, text, {60, depth}, 3, 1);
      REQUIRE(sample.evidence.size() == sample.expected.size());
      const TaskPrompt prompt = encode_task(tokenizer, {}, sample);
      const std::vector<Passage> windows = answer_passages(tokenizer, prompt);
      REQUIRE(windows.size() == sample.expected.size());
      for (std::size_t i = 0; i < windows.size(); ++i) {
        CHECK(windows[i].name ==
              (windows.size() == 1 ? "answer" : fmt::format("answer {}", i + 1)));
        const std::span<const std::int32_t> ids(prompt.context);
        const std::string said = tokenizer.decode(ids.subspan(windows[i].start, windows[i].tokens));
        CHECK(said.find(sample.evidence[i]) != said.npos);
        CHECK(sample.evidence[i].find(sample.expected[i]) != said.npos);
        CHECK(said.size() <= sample.evidence[i].size() + 2);
      }
    }
}

TaskRequest two_questions() {
  TaskRequest request{.words = {30}, .depths = {0.5}, .samples = 2};
  request.answers.max_new_tokens = 2;
  return request;
}

TEST_CASE(
    "A question's trace has its segments, the expected answer as decoded tokens, and the "
    "passage") {
  const test::TemporaryFolder folder;
  const Tokenizer tokenizer = Tokenizer::load(kTinyModel + "/tokenizer.json");
  const TaskRun run = run_task(tiny(), tokenizer, two_questions());
  AtomicFolder filled(folder / "traces");
  capture_tasks(tiny(), tokenizer, kTinyModel, run, filled, 2, {});
  filled.commit();
  std::size_t traces = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder / "traces"))
    ++traces;
  CHECK(traces == 4);
  for (std::uint32_t sample = 0; sample < 2; ++sample)
    for (const QueryMode mode : run.modes) {
      const TaskPrompt& prompt = run.prompts[sample];
      const TraceReader trace =
          TraceReader::open(folder / "traces" / fmt::format("30-50%-{}-{}", sample, name_of(mode)));
      std::vector<std::int32_t> ids;
      std::vector<Segment> segments;
      for (const auto& part : prompt.segments(mode)) {
        segments.push_back({static_cast<std::uint32_t>(ids.size()),
                            static_cast<std::uint32_t>(part.size()), SegmentKind::prompt});
        ids.insert(ids.end(), part.begin(), part.end());
      }
      segments.push_back(
          {prompt.tokens(), static_cast<std::uint32_t>(prompt.answer.size()), SegmentKind::decode});
      ids.insert(ids.end(), prompt.answer.begin(), prompt.answer.end());
      CHECK(std::ranges::equal(trace.ids(), ids));
      CHECK(trace.segments() == segments);
      CHECK(trace.header().passages == answer_passages(tokenizer, prompt));
      CHECK(trace.extras().sketch);
      CHECK(trace.extras().residual_norm2);
    }
}

TEST_CASE("If one trace of a set of questions cannot be written, none is left") {
  const test::TemporaryFolder folder;
  const Tokenizer tokenizer = Tokenizer::load(kTinyModel + "/tokenizer.json");
  TaskRun run = run_task(tiny(), tokenizer, two_questions());
  run.prompts[1].evidence = {"words that do not occur"};
  CHECK_THROWS_AS(
      [&] {
        const AtomicFolder filled(folder / "traces");
        capture_tasks(tiny(), tokenizer, kTinyModel, run, filled, 2, {});
      }(),
      std::invalid_argument);
  CHECK(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace kvlab
