// How `kvlab eval` cuts texts into sequences.
#include "tools/eval.hpp"

#include "tests/catch.hpp"

namespace kvlab {
namespace {

/// Tokens that `full` scores on one text of `length` tokens, in windows of 64 with the model's
/// first token in front of each.
std::uint64_t scored(std::size_t length, EvalOptions options) {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  options.window = 64;
  options.threads = 2;
  return evaluate(model, {std::vector<std::int32_t>(length, 300)}, {}, options).front().tokens;
}

TEST_CASE("Half of each window is scored, but for its last token, which has no successor") {
  CHECK(scored(63, {}) == 31);
  CHECK(scored(126, {}) == 62);
  CHECK(scored(126, {.span = Span::all}) == 126);
}

TEST_CASE("A remainder shorter than half a window is left out") {
  CHECK(scored(63 + 30, {}) == 31);
  CHECK(scored(63 + 31, {}) == 31 + 15);
}

TEST_CASE("A remainder that is all prompt is left out") {
  CHECK(scored(63 + 40, {.prompt_tokens = 41}) == 22);
  CHECK(scored(63 + 41, {.prompt_tokens = 41}) == 22);
  CHECK(scored(63 + 42, {.prompt_tokens = 41}) == 22 + 1);
  CHECK(scored(63 + 40, {.prompt_tokens = 41, .span = Span::all}) == 63 + 40);
}

TEST_CASE("A stream is one sequence, whatever the window") {
  CHECK(scored(200, {.stream = true}) == 100);
}

}  // namespace
}  // namespace kvlab
