// How `kvlab eval` cuts texts into sequences.
#include "engine/loop/eval.hpp"

#include <cmath>

#include "tests/catch.hpp"

namespace kvlab {
namespace {

/// Tokens that `full` scores on one text of `length` tokens, in windows of 64 with the model's
/// first token in front of each.
std::uint64_t scored(std::size_t length, EvalOptions options) {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  options.window = 64;
  options.threads = 2;
  return evaluate(model.config(), sweep_by_layers(model), {std::vector<std::int32_t>(length, 300)},
                  {}, options)
      .front()
      .tokens;
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

TEST_CASE("Side by side, windows and budgets score what they score one by one") {
  const auto backend = load_backend(Device::cpu, KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  std::vector<std::vector<std::int32_t>> texts(2);
  for (std::int32_t i = 0; i < 150; ++i) texts[0].push_back(300 + i * 37 % 211);
  for (std::int32_t i = 0; i < 90; ++i) texts[1].push_back(500 + i * 53 % 307);
  std::vector<CacheConfig> configs;
  for (const char* policy : {"h2o", "window", "random"})
    for (const std::uint32_t budget : {8u, 16u})
      for (const Prefill prefill : {Prefill{0}, Prefill{1}, Prefill{5}})
        configs.push_back({.policy = parse_policy(policy),
                           .budget = {.extent = tokens(budget)},
                           .prefill = prefill,
                           .seed = 7});
  const EvalOptions options{.window = 64, .threads = 2};
  const Sweep one_by_one = sweep_by_tokens(*backend),
              side_by_side = sweep_by_batches(backend->batches());
  for (const std::uint32_t prompt : {0u, 20u}) {
    EvalOptions how = options;
    how.prompt_tokens = prompt;
    const auto expected = evaluate(backend->config(), one_by_one, texts, configs, how);
    const auto scores = evaluate(backend->config(), side_by_side, texts, configs, how);
    REQUIRE(scores.size() == expected.size());
    for (std::size_t c = 0; c < scores.size(); ++c) {
      CAPTURE(prompt, c);
      CHECK(scores[c].tokens == expected[c].tokens);
      CHECK(std::fabs(scores[c].nll - expected[c].nll) < 1e-9);
      CHECK(std::fabs(scores[c].kl - expected[c].kl) < 1e-9);
      CHECK(scores[c].same_first == expected[c].same_first);
      CHECK(scores[c].kv_bytes_peak == expected[c].kv_bytes_peak);
    }
  }
}

TEST_CASE("Blocks of a stream share its tokens, and nothing is compared without the full cache") {
  const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 300; ++i) ids.push_back(300 + i * 37 % 211);
  const CacheConfig window{
      .policy = parse_policy("window"), .budget = {.extent = tokens(32)}, .prefill = Prefill{8}};
  EvalOptions options{.stream = true,
                      .prompt_tokens = 120,
                      .span = Span::all,
                      .against_full = false,
                      .block_tokens = 64,
                      .threads = 2};
  const auto by_layers = evaluate(model.config(), sweep_by_layers(model), {ids}, {window}, options);
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
  const auto by_tokens =
      evaluate(model.config(), sweep_by_tokens(*backend), {ids}, {window}, options);
  REQUIRE(by_tokens.size() == 1);
  CHECK(std::fabs(by_tokens[0].nll - by_layers[0].nll) < 1e-4);
  CHECK(by_tokens[0].blocks[4].milliseconds_per_token > 0);
}

}  // namespace
}  // namespace kvlab
