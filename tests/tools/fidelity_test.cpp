// Tests of `kvlab fidelity`, which measures how well metrics order policies like the end-to-end
// evaluation.
#include "engine/evaluation/fidelity/fidelity.hpp"

#include "engine/backend.hpp"
#include "engine/capture.hpp"
#include "engine/evaluation/pages.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

std::vector<CacheConfig> sweep(const std::vector<std::string>& policies,
                               const std::vector<std::string>& budgets) {
  std::vector<CacheConfig> configs;
  for (const std::string& budget : budgets)
    for (const std::string& policy : policies)
      configs.push_back({.policy = parse_policy(policy), .budget = parse_budget(budget)});
  return configs;
}

/// A text with metrics of a replay, in which each token has the KL `kl` of the configuration.
FidelityText text_of(const std::string& name, const std::vector<double>& kl,
                     ReplayMetrics replay_metrics) {
  FidelityText text{.name = name,
                    .tokens = 64,
                    .prompt_tokens = 32,
                    .kl = kl,
                    .replay_metrics = std::move(replay_metrics)};
  for (const double mean : kl) text.kl_tokens.emplace_back(64, mean);
  return text;
}

TEST_CASE("A metric is judged by its rank correlation and its regret, within each budget") {
  const auto configs = sweep({"window", "sink", "h2o"}, {"8", "16"});
  const FidelityText one = text_of(
      "one", {3, 2, 1, .3, .2, .1},
      {{"nll_recall", {30, 20, 10, 1, 2, 3}}, {"recall", {1, 2, 3, 4, 5, 6}}, {"layer_error", {}}});
  const FidelityText two =
      text_of("two", {3, 1, 2, .3, .2, .1},
              {{"nll_recall", {30, 20, 10, 1, 2, 3}}, {"recall", {1, 2, 3, 4, 5, 6}}});
  const std::vector<FidelityText> texts{one, two};
  const Fidelity found = assess_fidelity(configs, texts);
  REQUIRE(found.metrics.size() == 2);  // only the metrics that every text has
  CHECK(found.standard == "nll_recall");
  const FidelityMetric& nll = found.metrics[0];
  CHECK(nll.metric == "nll_recall");
  CHECK(nll.within[0].rho ==
        Approx(spearman(std::vector<double>{30, 20, 10}, std::vector<double>{3, 1.5, 1.5})));
  CHECK(nll.within[0].rho_single == Approx((1 + 0.5) / 2));
  CHECK(nll.within[0].worst_regret == Approx(2));  // on text two
  CHECK(nll.within[1].rho == Approx(-1));
  CHECK(nll.within[1].regret == Approx(3));
  CHECK(nll.within[1].chosen == 3);
  CHECK(nll.within[1].best == 5);
  CHECK(found.metrics[1].within[1].rho == Approx(1));  // for recall, higher is better
  CHECK(found.ceiling[0] == Approx(0.5));
  CHECK(found.ceiling[1] == Approx(1));
  // At budget 8, the differences of all pairs vary so much between the two texts that none is
  // significant. At budget 16 all three pairs differ significantly, and the metric orders all three
  // wrongly.
  CHECK(nll.within[0].significantly_different == 0);
  CHECK(nll.within[0].misordered.empty());
  CHECK(nll.within[1].significantly_different == 3);
  REQUIRE(nll.within[1].misordered.size() == 3);
  CHECK(nll.within[1].misordered[0].ratio == Approx(3));
  CHECK(nll.within[1].misordered[0].preferred == 3);
  CHECK(nll.within[1].misordered[0].better == 5);
  CHECK_THROWS_AS(assess_fidelity(sweep({"window", "sink"}, {"8"}), texts), std::invalid_argument);
}

TEST_CASE("fidelity's output makes a report, and policy files say how good a metric was") {
  const auto configs = sweep({"window", "sink", "h2o"}, {"8", "16"});
  const std::vector<FidelityText> texts{
      text_of("one", {3, 2, 1, .3, .2, .1},
              {{"nll_recall", {30, 20, 10, 1, 2, 3}},
               {"kv_bytes_mean", {512, 512, 256, 1024, 1024, 512}}}),
      text_of("two", {3, 1, 2, .3, .2, .1},
              {{"nll_recall", {30, 20, 10, 1, 2, 3}},
               {"kv_bytes_mean", {512, 512, 256, 1024, 1024, 512}}})};
  nlohmann::ordered_json json{
      {"format", kFidelityFormat}, {"model", "m"}, {"weights_xxh3", "ab"}, {"kvlab", "1"}};
  add_fidelity(json, assess_fidelity(configs, texts), configs, texts);
  const test::TemporaryFolder folder;
  write_file_atomically(folder / kFidelityCsv, fidelity_csv(configs, texts, 16));
  write_file_atomically(folder / kFidelityJson, json_text(json));
  const auto& [page, figures] = fidelity_page(folder.path());
  const auto& data = page.data;
  const auto& at_16 = data["facts"]["metrics"][0]["budgets"][1];
  CHECK(data["facts"]["metrics"][0]["name"] == "nll_recall");
  CHECK(data["facts"]["budgets"] == nlohmann::ordered_json{"8", "16"});
  CHECK(at_16["misordered"] == 3);
  CHECK(at_16["significantly_different"] == 3);
  CHECK(at_16["wrong"].size() == 3);
  REQUIRE(figures.size() == 3);
  CHECK(figures[0].name == "frontier");
  REQUIRE(figures[0].series.size() == 3);
  CHECK(figures[0].series[2].points[0].x == 0.25);  // KiB
  CHECK(figures[0].series[2].points[0].y == 1.5);
  CHECK(data["figures"][0]["name"] == "frontier");
  CHECK(figures[2].title == "budget 16, rho -1.00");
  CHECK(figures[2].y.title == "KL to the full cache, nats");
  CHECK(figures[2].x.title == "−ln recall");
  CHECK(data["facts"]["texts"][0] ==
        nlohmann::ordered_json{{"name", "one"}, {"tokens", 64}, {"prompt_tokens", 32}});

  const auto file = folder / kFidelityJson;
  const nlohmann::json evidence = fidelity_evidence(file, "nll_recall", 13, "ab");
  CHECK(evidence["budget"] == "16");
  CHECK(evidence["rho"] == Approx(-1));
  CHECK(evidence["regret"] == Approx(3));
  CHECK(fidelity_evidence(file, "nll_recall", 9, "ab")["budget"] == "8");
  CHECK(evidence_text(evidence).find("rank correlation -1.00") != std::string::npos);
  CHECK(test::error_of([&] {
          fidelity_evidence(file, "nll_recall", 9, "cd");
        }).find("was measured on weights") != std::string::npos);
  CHECK(test::error_of([&] {
          fidelity_evidence(file, "recall", 9, "ab");
        }).find("has no results for recall") != std::string::npos);
  json["default_metric"] = "recall";
  write_file_atomically(file, json_text(json));
  CHECK(test::error_of([&] { fidelity_page(folder.path()); }).find("default_metric") !=
        std::string::npos);
}

TEST_CASE(
    "Budgets as shares of texts of different lengths give no evidence for a budget in "
    "tokens") {
  const test::TemporaryFolder folder;
  const auto file = folder / kFidelityJson;
  const auto evidence_at = [&](const std::string& budget, std::uint32_t second_tokens) {
    const auto configs = sweep({"window", "sink", "h2o"}, {budget});
    std::vector<FidelityText> texts{text_of("one", {3, 2, 1}, {{"nll_recall", {30, 20, 10}}}),
                                    text_of("two", {3, 1, 2}, {{"nll_recall", {30, 20, 10}}})};
    texts[1].tokens = second_tokens;
    nlohmann::ordered_json json{
        {"format", kFidelityFormat}, {"model", "m"}, {"weights_xxh3", "ab"}, {"kvlab", "1"}};
    add_fidelity(json, assess_fidelity(configs, texts), configs, texts);
    write_file_atomically(folder / kFidelityCsv, fidelity_csv(configs, texts, 16));
    write_file_atomically(file, json_text(json));
    return fidelity_evidence(file, "nll_recall", 13, "ab");
  };
  const nlohmann::json evidence = evidence_at("25%", 64);
  CHECK(evidence["budget"] == "25%");
  CHECK(evidence["tokens"] == nlohmann::json{{"one", 64}, {"two", 64}});
  CHECK(evidence["file_xxh3"] == xxh3_hex(read_text_file(file, 1 << 20)));
  CHECK(evidence_at("16", 96)["tokens"]["two"] == 96);
  const auto texts = fidelity_page(folder.path()).page.data["facts"]["texts"];
  CHECK(texts[0]["tokens"] == 64);
  CHECK(texts[1]["tokens"] == 96);
  CHECK(texts[1]["prompt_tokens"] == 32);
  CHECK(test::error_of([&] { evidence_at("25%", 96); }) ==
        file.string() +
            ": tokens: 2 texts have 2 different lengths, so budget 25% is not one number of "
            "tokens; use texts of one length, or budgets in tokens");
  CHECK(evidence_at("pyramid(25%)", 64)["budget"] == "pyramid(25%)");
}

TEST_CASE("A text is captured, replayed and evaluated over the same ids") {
  const std::filesystem::path model = KVLAB_SOURCE_DIR "/engine/models/tiny";
  const Model loaded = Model::load(model, 2);
  const auto backend = cpu_backend(loaded, 2);
  const Tokenizer tokenizer = Tokenizer::load(model / "tokenizer.json");
  EvalText text{.name = "prompt",
                .ids = tokenizer.encode(
                    read_text_file(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt", 1 << 20), false),
                .prompt_tokens = 64,
                .trace = {}};
  text.ids.resize(200);
  const OutputSketch sketch = output_sketch(model, kSketchSeed, 2);
  const test::TemporaryFolder folder;
  const auto configs = sweep({"window", "sink", "h2o"}, {"16", "200"});
  const SweepRunner run_sweep = layer_sweep_runner(loaded);
  const OfflineReplayOptions options{.sketch = sketch, .capture = folder / "prompt", .threads = 2};
  const FidelityText measured =
      fidelity_text(text, kl_of(end_to_end_scores(run_sweep, text, configs, 2, {})),
                    run_offline_replay(*backend, text, configs, options));
  CHECK(open_verified_trace(folder / "prompt", 2).has_residuals());
  const auto& residual = measured.replay_metrics.at("residual_error");
  for (std::size_t c = 0; c < 3; ++c) {
    CHECK(residual[c] > 0);
    CHECK(measured.kl[c] > 0);
    CHECK(residual[c + 3] == 0);  // this budget keeps every token
  }
  CHECK(measured.kl[3] ==
        0);  // window; sink may have a KL above 0, because cache positions are rounded differently

  // The trace can be used in place of the text.
  const EvalText again = text_of_trace(folder / "prompt", backend->weights_xxh3(), 2);
  CHECK(again.name == "prompt");
  CHECK(again.ids == text.ids);
  CHECK(again.prompt_tokens == 64);
  CHECK(run_offline_replay(*backend, again, configs, options) == measured.replay_metrics);
  CHECK(test::error_of([&] {
          text_of_trace(folder / "prompt", "0123456789abcdef", 2);
        }).find("was captured from weights") != std::string::npos);
}

}  // namespace
}  // namespace kvlab
