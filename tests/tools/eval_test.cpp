// Tests of `kvlab eval`: how it splits texts into sequences, and its comparisons, warnings and
// files.
#include "engine/evaluation/eval.hpp"

#include <algorithm>
#include <cmath>

#include "engine/evaluation/eval/score.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/evaluation/scores.hpp"
#include "sim/report/recommendation.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"
#include "traces/base/json_fields.hpp"

namespace kvlab {
namespace {

/// The number of tokens that `full` scores on one text of `length` tokens, in windows of 64 that
/// begin with the model's first token.
std::uint64_t scored(std::size_t length, EvalOptions options) {
  static const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  options.window = 64;
  options.before = {0};
  options.threads = 2;
  return evaluate(model.config(), layer_sweep_runner(model),
                  {std::vector<std::int32_t>(length, 300)}, {}, options)
      .scores.front()
      .tokens;
}

TEST_CASE("Half of each window is scored, except its last token, which has no successor") {
  CHECK(scored(63, {}) == 31);
  CHECK(scored(126, {}) == 62);
  CHECK(scored(126, {.queries = Queries::all}) == 126);
}

TEST_CASE("A remainder shorter than half a window is left out") {
  CHECK(scored(63 + 30, {}) == 31);
  CHECK(scored(63 + 31, {}) == 31 + 15);
}

TEST_CASE("A remainder without tokens after its prompt is left out") {
  CHECK(scored(63 + 40, {.prompt_tokens = 41}) == 22);
  CHECK(scored(63 + 41, {.prompt_tokens = 41}) == 22);
  CHECK(scored(63 + 42, {.prompt_tokens = 41}) == 22 + 1);
  CHECK(scored(63 + 40, {.prompt_tokens = 41, .queries = Queries::all}) == 63 + 40);
}

TEST_CASE("A stream is one sequence for every window size") {
  CHECK(scored(200, {.stream = true}) == 100);
}

TEST_CASE("A stream is split into blocks, and without the full cache nothing is compared") {
  const Model model = Model::load(KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  std::vector<std::int32_t> ids;
  for (std::int32_t i = 0; i < 300; ++i) ids.push_back(300 + i * 37 % 211);
  const CacheConfig window{
      .policy = parse_policy("window"), .budget = {.extent = tokens(32)}, .prefill = Prefill{8}};
  EvalOptions options{.before = {0},
                      .stream = true,
                      .prompt_tokens = 120,
                      .queries = Queries::all,
                      .compares_to_full = false,
                      .block_tokens = 64,
                      .threads = 2};
  const auto by_layers =
      evaluate(model.config(), layer_sweep_runner(model), {ids}, {window}, options).scores;
  REQUIRE(by_layers.size() == 1);
  CHECK(std::isnan(by_layers[0].kl));
  CHECK(std::isnan(by_layers[0].same_first));
  CHECK(by_layers[0].tokens == 300);
  REQUIRE(by_layers[0].blocks.size() == 5);
  double sum = 0;
  for (const EvalBlock& block : by_layers[0].blocks)
    sum += block.nll * static_cast<double>(std::min<std::uint64_t>(64, 300 - block.first));
  CHECK(std::fabs(sum / 300 - by_layers[0].nll) < 1e-9);

  // Decoding token by token, with a prompt that is fed in parts, gives the same result.
  const auto backend = load_backend(Device::cpu, KVLAB_SOURCE_DIR "/engine/models/tiny", 2);
  const auto by_tokens =
      evaluate(model.config(), token_sweep_runner(*backend), {ids}, {window}, options).scores;
  REQUIRE(by_tokens.size() == 1);
  CHECK(std::fabs(by_tokens[0].nll - by_layers[0].nll) < 1e-4);
  CHECK(by_tokens[0].blocks[4].milliseconds_per_token > 0);
}

/// A sweep runner with made-up scores. `kl` returns the KL of a token, by configuration and index.
SweepRunner invented(
    const std::function<double(std::size_t configuration, std::size_t token)>& kl) {
  return [kl](const std::vector<std::vector<std::int32_t>>& sequences,
              std::span<const CacheConfig> configs, const EvalOptions&) {
    std::vector<std::vector<TokenScores>> scores(sequences.size());
    for (std::size_t s = 0; s < sequences.size(); ++s)
      for (std::size_t c = 0; c < configs.size(); ++c) {
        TokenScores& one = scores[s].emplace_back();
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

constexpr auto kWaves = [](std::size_t c, std::size_t i) {
  const double wave = 1 + 0.5 * std::sin(static_cast<double>(i));
  if (c == 0) return 0.0;
  // On average, this configuration is as good as the third one.
  if (c == 2) return 0.1 * wave + (i / 64 % 2 == 0 ? 0.01 : -0.01);
  return c == 1 ? 0.3 * wave : 0.1 * wave;
};

/// An evaluation over different texts. The KL of all configurations grows from text to text.
Evaluation invented_evaluation(std::size_t texts = 2,
                               std::vector<CacheConfig> configs = three_at_two_budgets()) {
  std::vector<std::vector<std::int32_t>> ids;
  for (std::size_t t = 0; t < texts; ++t) ids.emplace_back(1024, static_cast<std::int32_t>(t + 1));
  return evaluate(
      ModelConfig{.layers = 1, .kv_heads = 1, .head_size = 64, .trained_context = 1024, .bos = -1},
      invented(kWaves), ids, std::move(configs), {});
}

TEST_CASE("Configurations are compared in pairs") {
  const Evaluation evaluation = invented_evaluation(1);
  REQUIRE(evaluation.scores.size() == 7);
  const auto judgement = evaluation.judge_budget("8");
  const Recommendation& made = judgement.recommendation;
  REQUIRE(made.order.size() == 3);
  const std::size_t other = made.choice == 1 ? 2 : 1;  // lru and h2o
  CHECK(made.similar() == std::vector<std::size_t>{other});
  CHECK(judgement.scores[made.order[2]] == 1);
  const Difference& last = made.from_lowest[2];
  CHECK(last.significantly_different());
  CHECK(last.mean == Approx(0.2).epsilon(0.02));
  CHECK(made.scope.texts == 1);
  // Two texts with differences of 0.2 and 0.4 are too few for a significant difference.
  const auto two = invented_evaluation(2).judge_budget("8");
  CHECK(two.recommendation.from_lowest[2].mean == Approx(0.3).epsilon(0.02));
  CHECK_FALSE(two.recommendation.from_lowest[2].significantly_different());
}

/// An evaluation whose configurations draft two tokens. Later configurations are accepted less.
Evaluation invented_drafts(std::size_t texts) {
  std::vector<std::vector<std::int32_t>> ids;
  for (std::size_t t = 0; t < texts; ++t) ids.emplace_back(1025, static_cast<std::int32_t>(t + 1));
  const SweepRunner run_sweep = [](const auto& sequences, std::span<const CacheConfig> configs,
                                   const EvalOptions& options) {
    auto scores = invented(kWaves)(sequences, configs, options);
    for (auto& sequence : scores)
      for (std::size_t c = 0; c < configs.size(); ++c)
        for (std::size_t i = 0; i < sequence[c].nll.size(); ++i)
          sequence[c].acceptance.push_back(
              c == 0 ? 1 : (i % 2 == 0 ? 0.9 : 0.8) - 0.1 * static_cast<double>(c - 1));
    return scores;
  };
  return evaluate(
      ModelConfig{.layers = 1, .kv_heads = 1, .head_size = 64, .trained_context = 2048, .bos = -1},
      run_sweep, ids, three_at_two_budgets(), {.draft = 2});
}

TEST_CASE("Acceptance is reported by depth, and the highest one is recommended") {
  const Evaluation evaluation = invented_drafts(2);
  const std::vector<std::string> texts{"one", "two"};
  const auto json = eval_json(evaluation, texts);
  CHECK(json["draft"] == 2);
  const auto& full = json["configurations"][0];
  CHECK(full["acceptance"] == 1);
  CHECK(full["tokens_per_verification"] == 3);
  const auto& window = json["configurations"][1];
  // 1,025 tokens are 512 windows and one more token.
  CHECK(window["acceptance"].get<double>() == Approx((513 * 0.9 + 512 * 0.8) / 1025));
  REQUIRE(window["acceptance_by_depth"].size() == 2);
  CHECK(window["acceptance_by_depth"][0].get<double>() == Approx(0.9));
  CHECK(window["acceptance_by_depth"][1].get<double>() == Approx(0.8));
  CHECK(window["acceptance_by_depth_stderr"].size() == 2);
  CHECK(window["tokens_per_verification"].get<double>() == Approx(1 + 0.9 + 0.9 * 0.8));
  CHECK(window["by_text"][1]["acceptance"].get<double>() == Approx(0.85).margin(1e-3));
  CHECK(json["pairs"][0]["acceptance"]["mean"].get<double>() == Approx(-0.15).margin(1e-3));
  CHECK(invented_evaluation().judge_budget("8").scores[0] == 1);
  CHECK_FALSE(eval_json(invented_evaluation(), texts).contains("draft"));

  const auto judgement = evaluation.judge_budget("8");
  const Recommendation& made = judgement.recommendation;
  CHECK(made.scope.metric == "acceptance");
  CHECK(made.scope.higher_is_better);
  CHECK(judgement.scores[made.order[0]] == 1);
  CHECK(judgement.scores[made.choice] == 1);
  CHECK(made.mean(made.choice) == Approx(0.85).margin(1e-3));
  CHECK(made.from_lowest[1].mean == Approx(0.1));

  const test::TemporaryFolder folder;
  write_file_atomically(folder / kEvalCsv, eval_csv(evaluation, texts));
  write_file_atomically(folder / kEvalBlocksCsv, eval_blocks_csv(evaluation, texts));
  nlohmann::ordered_json whole{{"model", "m"}};
  whole.update(json);
  write_file_atomically(folder / kEvalJson, json_text(whole, 1));
  const ScoreSet scores = load_scores(folder.path());
  CHECK(scores.headline == "acceptance");
  CHECK(recommendations_for(scores, scores.metrics.front()).size() == 2);
  CHECK(explorer_data(scores).contains("recommendations"));
}

TEST_CASE("A repeated text counts once") {
  const std::vector<std::vector<std::int32_t>> texts(2, std::vector<std::int32_t>(1024, 1));
  const Evaluation twice = evaluate(
      ModelConfig{.layers = 1, .kv_heads = 1, .head_size = 64, .trained_context = 1024, .bos = -1},
      invented(kWaves), texts, three_at_two_budgets(), {});
  CHECK(twice.kl.texts() == 1);
  CHECK(twice.scores[1].tokens == 1024);
  CHECK(twice.scores[1].kl == invented_evaluation(1).scores[1].kl);
}

TEST_CASE("A text with a few more words counts once, and both are named") {
  std::vector<std::int32_t> text;
  for (std::int32_t i = 0; i < 1100; ++i) text.push_back(i * i % 997);
  std::vector<std::int32_t> longer = text;
  longer.insert(longer.end(), {1, 2, 3});
  const auto evaluated = [&](const std::vector<std::vector<std::int32_t>>& texts) {
    return evaluate(
        ModelConfig{.layers = 1, .kv_heads = 1, .head_size = 64, .trained_context = 300, .bos = -1},
        invented(kWaves), texts, three_at_two_budgets(),
        {.window = 300, .prompt_tokens = 100, .names = {"a.txt", "a2.txt"}});
  };
  const Evaluation alone = evaluated({longer}), both = evaluated({text, longer});
  CHECK(both.kl.texts() == 1);
  CHECK(both.scores[1].tokens == alone.scores[1].tokens);
  CHECK(both.scores[1].texts[0].tokens == 0);
  CHECK(std::isnan(both.scores[1].kl_deviation));
  REQUIRE(eval_warnings(both).size() >= 1);
  CHECK(eval_warnings(both)[0].starts_with("a2.txt and a.txt have text in common"));
  CHECK(eval_csv(both, {"a.txt", "a2.txt"}).find("\na.txt,") == std::string::npos);
}

TEST_CASE("Means are over texts of any length, and a short text is named") {
  std::vector<std::vector<std::int32_t>> texts{std::vector<std::int32_t>(1000, 1),
                                               std::vector<std::int32_t>(20, 2)};
  const Evaluation evaluation =
      evaluate(ModelConfig{.trained_context = 1000}, invented(kWaves), texts,
               three_at_two_budgets(), {.names = {"long", "snippet"}});
  const EvalScore& score = evaluation.scores[1];
  CHECK(score.kl == Approx((score.texts[0].kl + score.texts[1].kl) / 2));
  CHECK(score.nll == Approx((score.texts[0].nll + score.texts[1].nll) / 2));
  CHECK(score.perplexity == Approx(std::exp(score.nll)));
  const auto warnings = eval_warnings(evaluation);
  CHECK(std::ranges::any_of(warnings, [](const std::string& line) {
    return line.starts_with("every text has weight 1") &&
           line.ends_with("scored tokens: snippet (20); longest text: long (1000)");
  }));
  // The short text does not narrow the interval of the long text.
  const Evaluation alone = evaluate(ModelConfig{.trained_context = 1000}, invented(kWaves),
                                    {texts[0]}, three_at_two_budgets(), {});
  const auto width = [](const Difference& difference) {
    return difference.interval.high - difference.interval.low;
  };
  CHECK(width(evaluation.kl.difference(1, 2)) >= width(alone.kl.difference(1, 2)));
}

TEST_CASE("Peak memory over decoded queries decides which configurations are eligible") {
  std::vector<CacheConfig> configs;
  for (const char* policy : {"window:once", "h2o:every=8", "window", "h2o:sinks=4:recent=4"})
    configs.push_back({.policy = parse_policy(policy), .budget = parse_budget("8")});
  const Evaluation evaluation = invented_evaluation(1, configs);
  const auto kv = [&](std::size_t c) { return evaluation.scores[c].memory; };
  const double token = 2 * 2 * 64;
  CHECK(kv(1).peak == (7 + 512) * token);  // window:once keeps all 512 decoded tokens
  CHECK(kv(1).mean == Approx((7 + 256.5) * token));
  CHECK(kv(2).peak == 15 * token);
  CHECK(kv(3).mean == 8 * token);
  CHECK(kv(3).peak == 8 * token);
  CHECK(kv(3).budget == 8 * token);
  const auto judgement = evaluation.judge_budget("8");
  std::vector<std::size_t> eligible = judgement.recommendation.order;
  std::ranges::sort(eligible);
  CHECK(eligible == std::vector<std::size_t>{2, 3});
  CHECK(judgement.recommendation.over_budget.size() == 2);
  const auto warnings = eval_warnings(evaluation);
  CHECK(std::ranges::any_of(warnings, [](const std::string& line) {
    return line.starts_with("h2o:sinks=4:recent=4 at 8 tokens: the protected tokens fill");
  }));
}

TEST_CASE("Candidates that differ only in prefill or positions have different names") {
  const CacheConfig dense{.policy = parse_policy("h2o"), .budget = parse_budget("8")};
  CacheConfig stream = dense, cache = dense;
  stream.prefill = parse_prefill("stream"), cache.positions = Positions::cache;
  const Evaluation evaluation = invented_evaluation(1, {dense, stream, cache});
  const Recommendation made = evaluation.judge_budget("8").recommendation;
  std::vector<std::string> names;
  for (const Candidate& one : made.candidates) names.push_back(one.name);
  CHECK(names == std::vector<std::string>{"h2o (dense, original positions)",
                                          "h2o (stream, original positions)",
                                          "h2o (dense, cache positions)"});
  nlohmann::json json;
  json["list"] = nlohmann::json::array({nlohmann::json(recommendation_json(made))});
  const Recommendation read = recommendations_from(JsonFields(json, "test"), "list").front();
  CHECK(read.candidates[read.choice].name == made.chosen_candidate().name);
  CHECK(read.mean(read.choice) == made.mean(made.choice));
}

TEST_CASE("A policy that keeps the prompt has the same budget as others, and is over it") {
  std::vector<CacheConfig> configs;
  for (const char* policy : {"h2o:prompt", "h2o", "window:prompt"})
    configs.push_back({.policy = parse_policy(policy), .budget = parse_budget("8")});
  const Evaluation evaluation = invented_evaluation(1, configs);
  CHECK(evaluation.budgets() == std::vector<std::string>{"8"});
  for (std::size_t c = 1; c < 4; ++c) CHECK(evaluation.scores[c].budget_tokens == 8);
  const Evaluation::Judgement judgement = evaluation.judge_budget("8");
  const Recommendation& made = judgement.recommendation;
  REQUIRE(made.order.size() == 1);
  CHECK(made.chosen_candidate().name == "h2o");
  CHECK(made.over_budget.size() == 2);

  // If all policies keep the prompt, their budgets include its memory.
  configs.erase(configs.begin() + 1);
  const auto alone = invented_evaluation(1, configs).judge_budget("8");
  CHECK(alone.recommendation.order.size() == 2);
  CHECK_FALSE(alone.recommendation.none_eligible);
}

TEST_CASE("Percentiles are over single tokens, and the standard deviation is over texts") {
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

TEST_CASE("Each window begins once with the tokenizer's prefix, if there is one") {
  std::vector<std::vector<std::int32_t>> seen;
  const SweepRunner run_sweep = [&](const auto& sequences, std::span<const CacheConfig> configs,
                                    const EvalOptions& options) {
    seen = sequences;
    return invented([](std::size_t, std::size_t) { return 0.0; })(sequences, configs, options);
  };
  const auto windows = [&](std::vector<std::int32_t> text, std::vector<std::int32_t> before) {
    evaluate(ModelConfig{.trained_context = 4, .bos = 9}, run_sweep, {text}, {},
             {.before = before, .queries = Queries::all});
    return seen;
  };
  using Windows = std::vector<std::vector<std::int32_t>>;
  CHECK(windows({1, 2, 3, 4, 5}, {9}) == Windows{{9, 1, 2, 3}, {9, 4, 5}});
  CHECK(windows({9, 1, 2, 3, 4, 5}, {9}) == Windows{{9, 1, 2, 3}, {9, 4, 5}});
  CHECK(windows({1, 2, 3, 4, 5, 6}, {}) == Windows{{1, 2, 3, 4}, {5, 6}});
  CHECK(windows({8, 1, 2, 3}, {8, 9}) == Windows{{8, 9, 1, 2}, {8, 9, 3}});
}

TEST_CASE("A warning says that few tokens were scored") {
  const auto warns = [](std::size_t tokens, const std::vector<CacheConfig>& configs) {
    const auto lines = eval_warnings(
        evaluate(ModelConfig{.trained_context = 1024, .bos = -1},
                 invented([](std::size_t c, std::size_t) { return static_cast<double>(c); }),
                 {std::vector<std::int32_t>(tokens, 1)}, configs, {}));
    return std::ranges::count_if(lines, [](const std::string& line) {
      return line.starts_with("only 999 tokens were scored");
    });
  };
  // An evaluation of only the full cache has no recommendation, but it has to warn, too.
  for (const auto& configs : {three_at_two_budgets(), std::vector<CacheConfig>{}}) {
    CHECK(warns(999, configs) == 1);
    CHECK(warns(1000, configs) == 0);
  }
}

TEST_CASE("A text without scored tokens is refused by name before any work") {
  bool ran = false;
  const SweepRunner run_sweep = [&](const auto& sequences, std::span<const CacheConfig> configs,
                                    const EvalOptions& options) {
    ran = true;
    return invented([](std::size_t, std::size_t) { return 0.0; })(sequences, configs, options);
  };
  const auto refusal = [&](std::size_t length, EvalOptions options) {
    return test::error_of<std::invalid_argument>([&] {
      options.before = {1};
      evaluate(ModelConfig{.trained_context = 1024}, run_sweep,
               {std::vector<std::int32_t>(100, 2), std::vector<std::int32_t>(length, 2)},
               three_at_two_budgets(), options);
    });
  };
  CHECK(refusal(0, {.names = {"long", "empty"}}) == "text empty: has no tokens; give a longer one");
  CHECK(refusal(0, {.stream = true}) == "text 2: has no tokens; give a longer one");
  CHECK(
      refusal(20, {.prompt_tokens = 20, .names = {"long", "short"}})
          .starts_with("text short: a sequence of 21 tokens with a prompt of 20 leaves no token"));
  CHECK(refusal(1, {}).starts_with("text 2: a sequence of 2 tokens with a prompt of 1 "));
  CHECK(
      refusal(40, {.prompt_tokens = 20, .draft = 21}) ==
      "text 2: a sequence of 41 tokens has 20 scored tokens, fewer than --draft 21; give a longer "
      "text or a smaller --draft");
  CHECK_FALSE(ran);
  CHECK(refusal(21, {.prompt_tokens = 20}).empty());
  CHECK(refusal(20, {.prompt_tokens = 20, .queries = Queries::all}).empty());
  CHECK(refusal(1, {.queries = Queries::all}).empty());
}

TEST_CASE("An evaluation's folder is read back for its report, and damage is named") {
  const Evaluation evaluation = invented_evaluation();
  const std::vector<std::string> texts{"one", "two, too"};
  const test::TemporaryFolder folder;
  nlohmann::ordered_json json{
      {"model", "m<1>"}, {"weights_xxh3", "0"}, {"kvlab", "1"}, {"queries", "decode"}};
  json.update(eval_json(evaluation, texts));
  CHECK(json["configurations"][1]["kl_p90"] > json["configurations"][1]["kl_p50"]);
  CHECK(json["pairs"].size() == 12);
  REQUIRE(json["recommendations"].size() == 2);
  CHECK(json["recommendations"][0]["budget"] == "8");
  // Two texts are too few for a significant difference.
  CHECK(json["recommendations"][0]["order"][2]["from_lowest"]["significant"] == false);
  CHECK(json["recommendations"][0]["configurations"].size() == 3);
  CHECK(json["recommendations"][0]["texts"] == 2);
  CHECK(json["frontier"].size() > 1);
  const std::string csv = eval_csv(evaluation, texts);
  const auto rows = parse_score_rows(csv, "eval.csv");
  CHECK(std::ranges::count(rows, std::string("two, too"), &ResultRow::trace) == 7 * 2);
  write_file_atomically(folder / kEvalCsv, csv);
  write_file_atomically(folder / kEvalJson, json_text(json));
  write_file_atomically(folder / kEvalBlocksCsv, eval_blocks_csv(evaluation, texts));
  // The scores that are read back give the same difference as the evaluation.
  const ScoreSet set = load_scores(folder.path());
  const MetricTable metric_table(set.groups.front().rows);
  const Difference read = *metric_table.difference(1, 2, "8", "kl"),
                   found = evaluation.kl.difference(1, 2);
  CHECK(read.mean == Approx(found.mean));
  CHECK(read.interval.high == Approx(found.interval.high));
  CHECK(read.texts == 2);
  const PageDocument page = eval_page(set);
  CHECK(page.data["facts"]["model"] == "m<1>");
  const std::string html = page_html(page);
  CHECK(html.find("m<1>") == std::string::npos);
  CHECK(html.find("m\\u003c1>") != std::string::npos);
  const auto& made = page.data["recommendations"][0]["budgets"];
  REQUIRE(made.size() == 2);
  CHECK(made[0]["budget"] == "8");  // budgets are ordered by tokens and not as text
  CHECK(made[1]["budget"] == "16");
  CHECK(made[0]["order"][2]["from_choice"]["significant"] == false);
  CHECK(made[0]["colour"] != "");
  CHECK(page.text.find("budget") == 0);
  const auto& configurations = page.data["facts"]["configurations"];
  CHECK(std::ranges::any_of(configurations, [](const auto& one) {
    return one["label"] == "lru";  // labels have no default settings
  }));
  CHECK(configurations[1]["kl_p90"] == json["configurations"][1]["kl_p90"]);

  std::string damaged = csv;
  damaged.replace(damaged.find("1024,dense"), 4, "many");
  write_file_atomically(folder / kEvalCsv, damaged);
  CHECK(test::error_of([&] {
          eval_page(load_scores(folder.path()));
        }).find("eval.csv: line 2: budget_tokens") != std::string::npos);
  write_file_atomically(folder / kEvalCsv, csv);
  auto whole = json;
  json["recommendations"][0].erase("choice");
  write_file_atomically(folder / kEvalJson, json_text(json));
  CHECK(test::error_of([&] { eval_page(load_scores(folder.path())); }).find("recommendations[0]") !=
        std::string::npos);
  whole["recommendations"][1]["configurations"][0] = 99;
  write_file_atomically(folder / kEvalJson, json_text(whole));
  CHECK(test::error_of([&] {
          eval_page(load_scores(folder.path()));
        }).find("recommendations[1]: configurations: 99; it should be below 7") !=
        std::string::npos);
  whole.erase("recommendations");  // as in a file of an older version
  write_file_atomically(folder / kEvalJson, json_text(whole));
  const PageDocument older = eval_page(load_scores(folder.path()));
  CHECK(older.data["facts"]["has_recommendations"] == false);
  CHECK(older.text.empty());
}

}  // namespace
}  // namespace kvlab
