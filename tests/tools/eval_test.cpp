// How `kvlab eval` cuts texts into sequences.
#include "engine/loop/eval.hpp"

#include <algorithm>
#include <cmath>

#include "engine/loop/eval/page.hpp"
#include "engine/loop/eval/table.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

/// Tokens that `full` scores on one text of `length` tokens, in windows of 64 with the model's
/// first token in front of each.
std::uint64_t scored(std::size_t length, EvalOptions options) {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  options.window = 64;
  options.before = {0};
  options.threads = 2;
  return evaluate(model.config(), sweep_by_layers(model), {std::vector<std::int32_t>(length, 300)},
                  {}, options)
      .scores.front()
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

TEST_CASE("Blocks of a stream share its tokens, and nothing is compared without the full cache") {
  const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 300; ++i) ids.push_back(300 + i * 37 % 211);
  const CacheConfig window{
      .policy = parse_policy("window"), .budget = {.extent = tokens(32)}, .prefill = Prefill{8}};
  EvalOptions options{.before = {0},
                      .stream = true,
                      .prompt_tokens = 120,
                      .span = Span::all,
                      .against_full = false,
                      .block_tokens = 64,
                      .threads = 2};
  const auto by_layers =
      evaluate(model.config(), sweep_by_layers(model), {ids}, {window}, options).scores;
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
      evaluate(model.config(), sweep_by_tokens(*backend), {ids}, {window}, options).scores;
  REQUIRE(by_tokens.size() == 1);
  CHECK(std::fabs(by_tokens[0].nll - by_layers[0].nll) < 1e-4);
  CHECK(by_tokens[0].blocks[4].milliseconds_per_token > 0);
}

/// A sweep that makes scores up: `kl` of each token by configuration and place.
Sweep invented(const std::function<double(std::size_t configuration, std::size_t token)>& kl) {
  return [kl](const std::vector<std::vector<std::int32_t>>& sequences,
              std::span<const CacheConfig> configs, const EvalOptions&) {
    std::vector<std::vector<LoopScores>> scores(sequences.size());
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (std::size_t c = 0; c < configs.size(); ++c) {
        LoopScores& one = scores[s].emplace_back();
        for (std::size_t i = 0; i < sequences[s].size(); ++i) {
          one.kl.push_back(kl(c, i) * static_cast<double>(s + 1));
          one.nll.push_back(3 + one.kl.back());
          one.same_first.push_back(one.kl.back() == 0);
        }
        one.kv_bytes_peak = 1024;
      }
    return scores;
  };
}

std::vector<CacheConfig> three_at_two_budgets() {
  std::vector<CacheConfig> configs;
  for (const char* budget : {"8", "16"})
    for (const char* policy : {"window", "lru", "h2o"})
      configs.push_back({.policy = parse_policy(policy), .budget = parse_budget(budget)});
  return configs;
}

Evaluation invented_evaluation() {
  const Sweep sweep = invented([](std::size_t c, std::size_t i) {
    const double wave = 1 + 0.5 * std::sin(static_cast<double>(i));
    if (c == 0) return 0.0;
    if (c == 2) return 0.1 * wave + (i / 64 % 2 == 0 ? 0.01 : -0.01);  // as good as the third
    return c == 1 ? 0.3 * wave : 0.1 * wave;
  });
  return evaluate(ModelConfig{.trained_context = 1024}, sweep,
                  {std::vector<std::int32_t>(1024, 1), std::vector<std::int32_t>(1024, 2)},
                  three_at_two_budgets(), {});
}

TEST_CASE("Contenders are compared in pairs: ahead, or not to be told apart") {
  const Evaluation evaluation = invented_evaluation();
  REQUIRE(evaluation.scores.size() == 7);
  CHECK(evaluation.pairs.size() == 6 + 3 + 3);  // with the full cache, and within each budget
  const auto contenders = evaluation.contenders("8");
  REQUIRE(contenders.size() == 3);
  CHECK(contenders[0].score + contenders[1].score == 2 + 3);  // lru and h2o, in either order
  CHECK_FALSE(contenders[1].behind.told_apart());
  CHECK(contenders[2].score == 1);
  CHECK(contenders[2].behind.told_apart());
  CHECK(contenders[2].behind.mean == Approx(0.3).epsilon(0.02));
  CHECK(contenders[2].behind.interval.low > 0.25);
  CHECK(contenders[2].behind.interval.high < 0.35);
}

TEST_CASE("Percentiles are those of single tokens, and texts have a spread") {
  const Evaluation evaluation = evaluate(
      ModelConfig{.trained_context = 1000},
      invented([](std::size_t c, std::size_t i) { return c ? static_cast<double>(i) : 0; }),
      {std::vector<std::int32_t>(1000, 1)}, three_at_two_budgets(), {});
  const EvalScore& score = evaluation.scores[1];
  CHECK(score.kl == Approx(499.5));
  CHECK(score.kl_p50 == Approx(499.5));
  CHECK(score.kl_p90 == Approx(899.1));
  CHECK(score.kl_p99 == Approx(989.01));
  CHECK(std::isnan(score.kl_deviation));

  const EvalScore two = invented_evaluation().scores[1];
  REQUIRE(two.texts.size() == 2);
  CHECK(two.texts[1].kl == Approx(2 * two.texts[0].kl));
  CHECK(two.kl == Approx(1.5 * two.texts[0].kl));
  CHECK(two.kl_deviation == Approx(two.texts[0].kl / std::sqrt(2.0)));
}

TEST_CASE("Each window has what the tokenizer puts before a text once, or nothing") {
  std::vector<std::vector<std::int32_t>> seen;
  const Sweep sweep = [&](const auto& sequences, std::span<const CacheConfig> configs,
                          const EvalOptions& options) {
    seen = sequences;
    return invented([](std::size_t, std::size_t) { return 0.0; })(sequences, configs, options);
  };
  const auto windows = [&](std::vector<std::int32_t> text, std::vector<std::int32_t> before) {
    evaluate(ModelConfig{.trained_context = 4, .bos = 9}, sweep, {text}, {},
             {.before = before, .span = Span::all});
    return seen;
  };
  using Windows = std::vector<std::vector<std::int32_t>>;
  CHECK(windows({1, 2, 3, 4, 5}, {9}) == Windows{{9, 1, 2, 3}, {9, 4, 5}});
  CHECK(windows({9, 1, 2, 3, 4, 5}, {9}) == Windows{{9, 1, 2, 3}, {9, 4, 5}});
  CHECK(windows({1, 2, 3, 4, 5, 6}, {}) == Windows{{1, 2, 3, 4}, {5, 6}});
  CHECK(windows({8, 1, 2, 3}, {8, 9}) == Windows{{8, 9, 1, 2}, {8, 9, 3}});
}

TEST_CASE("Few scored tokens are warned of") {
  CHECK(few_tokens_warning(invented_evaluation()).empty());
  const Evaluation few =
      evaluate(ModelConfig{.trained_context = 1024},
               invented([](std::size_t c, std::size_t) { return static_cast<double>(c); }),
               {std::vector<std::int32_t>(999, 1)}, three_at_two_budgets(), {});
  CHECK(few_tokens_warning(few).starts_with("999 scored tokens"));
}

TEST_CASE("A text of which nothing would be scored is refused by name before any runs") {
  bool ran = false;
  const Sweep sweep = [&](const auto& sequences, std::span<const CacheConfig> configs,
                          const EvalOptions& options) {
    ran = true;
    return invented([](std::size_t, std::size_t) { return 0.0; })(sequences, configs, options);
  };
  const auto refusal = [&](std::size_t length, EvalOptions options) {
    return test::error_of<std::invalid_argument>([&] {
      options.before = {1};
      evaluate(ModelConfig{.trained_context = 1024}, sweep,
               {std::vector<std::int32_t>(100, 2), std::vector<std::int32_t>(length, 2)},
               three_at_two_budgets(), options);
    });
  };
  CHECK(refusal(0, {.names = {"long", "empty"}}) ==
        "text empty: has no tokens; a longer one is needed");
  CHECK(refusal(0, {.stream = true}) == "text 2: has no tokens; a longer one is needed");
  CHECK(refusal(20, {.prompt_tokens = 20, .names = {"long", "short"}})
            .starts_with("text short: a sequence of 21 tokens with a prompt of 20 leaves none"));
  CHECK(refusal(1, {}).starts_with("text 2: a sequence of 2 tokens with a prompt of 1 "));
  CHECK_FALSE(ran);
  CHECK(refusal(21, {.prompt_tokens = 20}).empty());
  CHECK(refusal(20, {.prompt_tokens = 20, .span = Span::all}).empty());
  CHECK(refusal(1, {.span = Span::all}).empty());
}

TEST_CASE("An evaluation's folder is read back for its page, and damage is named") {
  const Evaluation evaluation = invented_evaluation();
  const std::vector<std::string> texts{"one", "two, too"};
  const test::TemporaryFolder folder;
  nlohmann::ordered_json json{
      {"model", "m<1>"}, {"weights_xxh3", "0"}, {"kvlab", "1"}, {"span", "decode"}};
  json.update(eval_json(evaluation, texts));
  CHECK(json["configurations"][1]["kl_p90"] > json["configurations"][1]["kl_p50"]);
  CHECK(json["pairs"].size() == 12);
  CHECK(json["contenders"]["8"][2]["behind"]["told_apart"] == true);
  const std::string csv = eval_csv(evaluation, texts);
  const auto rows = parse_score_rows(csv, "eval.csv");
  CHECK(std::ranges::count(rows, std::string("two, too"), &ResultRow::trace) == 7 * 2);
  write_file_atomically(folder / kEvalCsv, csv);
  write_file_atomically(folder / kEvalJson, json_text(json));
  const std::string page = eval_page(folder.path());
  CHECK(page.find("m&lt;1&gt;") != std::string::npos);
  CHECK(page.find("cannot be told apart") != std::string::npos);
  const auto at_8 = page.find("<caption>budget 8<"), at_16 = page.find("<caption>budget 16<");
  CHECK(at_8 < at_16);  // by tokens, though not as text
  CHECK(at_16 != std::string::npos);
  CHECK(page.find("<td>lru</td>") != std::string::npos);  // no row repeats the defaults

  std::string damaged = csv;
  damaged.replace(damaged.find("1024,dense"), 4, "many");
  write_file_atomically(folder / kEvalCsv, damaged);
  CHECK(test::error_of([&] { eval_page(folder.path()); }).find("eval.csv: line 2: budget_tokens") !=
        std::string::npos);
  write_file_atomically(folder / kEvalCsv, csv);
  json.erase("contenders");
  write_file_atomically(folder / kEvalJson, json_text(json));
  CHECK(test::error_of([&] { eval_page(folder.path()); }).find("contenders") != std::string::npos);
}

}  // namespace
}  // namespace kvlab
