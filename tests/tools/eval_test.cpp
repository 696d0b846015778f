// How `kvlab eval` cuts texts into sequences.
#include "tools/eval.hpp"

#include <cmath>

#include "tests/catch.hpp"
#include "tools/decoder_loop.hpp"

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

TEST_CASE("Blocks of a stream share its tokens, and nothing is compared without the full cache") {
  const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 300; ++i) ids.push_back(300 + i * 37 % 211);
  const LoopConfig window{.cache = {.policy = parse_policy("window"),
                                    .budget = {.extent = tokens(32)},
                                    .prefill = Prefill{8}},
                          .budgets = {}};
  EvalOptions options{.stream = true,
                      .prompt_tokens = 120,
                      .span = Span::all,
                      .against_full = false,
                      .block_tokens = 64,
                      .threads = 2};
  const auto by_layers = evaluate(model, {ids}, {window}, options);
  REQUIRE(by_layers.size() == 1);
  CHECK(std::isnan(by_layers[0].kl));
  CHECK(std::isnan(by_layers[0].same_first));
  CHECK(by_layers[0].tokens == 300);
  REQUIRE(by_layers[0].blocks.size() == 5);
  double sum = 0;
  for (const EvalBlock& block : by_layers[0].blocks)
    sum += block.nll * static_cast<double>(std::min<std::uint64_t>(64, 300 - block.first));
  CHECK(std::fabs(sum / 300 - by_layers[0].nll) < 1e-9);

  // By tokens, where the prompt is fed in parts: the same.
  const auto backend = load_backend(Device::cpu, KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  const LoopRunner run = [&](std::span<const std::int32_t> sequence,
                             std::span<const LoopConfig> grid, const LoopOptions& how) {
    return run_decoder_loop(*backend, sequence, grid, how);
  };
  const auto by_tokens = evaluate(model.config(), run, {ids}, {window}, options);
  REQUIRE(by_tokens.size() == 1);
  CHECK(std::fabs(by_tokens[0].nll - by_layers[0].nll) < 1e-4);
  CHECK(by_tokens[0].blocks[4].milliseconds_per_token > 0);
}

}  // namespace
}  // namespace kvlab
