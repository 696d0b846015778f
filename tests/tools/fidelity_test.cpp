// Which figure orders policies as the closed loop does.
#include "engine/loop/fidelity/fidelity.hpp"

#include <cmath>

#include "engine/backend.hpp"
#include "engine/output_sketch.hpp"
#include "engine/tokenizer/tokenizer.hpp"
#include "tests/catch.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"

namespace kvlab {
namespace {

std::vector<CacheConfig> grid(const std::vector<std::string>& policies,
                              const std::vector<std::string>& budgets) {
  std::vector<CacheConfig> configs;
  for (const std::string& budget : budgets)
    for (const std::string& policy : policies)
      configs.push_back({.policy = parse_policy(policy), .budget = parse_budget(budget)});
  return configs;
}

TEST_CASE("A figure is judged within a budget, and by what its choice costs") {
  const auto configs = grid({"window", "sink", "h2o"}, {"8", "16"});
  const FidelityText one{"one",
                         {3, 2, 1, .3, .2, .1},
                         {{"nll_recall", {30, 20, 10, 1, 2, 3}}, {"recall", {1, 2, 3, 4, 5, 6}}}};
  const FidelityText two{"two",
                         {3, 1, 2, .3, .2, .1},
                         {{"nll_recall", {30, 20, 10, 1, 2, 3}}, {"recall", {1, 2, 3, 4, 5, 6}}}};
  const std::vector<FidelityText> texts{one, two};
  const Fidelity found = assess_fidelity(configs, texts);
  REQUIRE(found.metrics.size() == 2);
  const FidelityMetric& nll = found.metrics[0];
  CHECK(nll.metric == "nll_recall");
  CHECK(nll.within[0].rho ==
        Approx(spearman(std::vector<double>{30, 20, 10}, std::vector<double>{3, 1.5, 1.5})));
  CHECK(nll.within[0].rho_single == Approx((1 + 0.5) / 2));
  CHECK(nll.within[0].worst_regret == Approx(2));  // of text two
  CHECK(nll.within[1].rho == Approx(-1));
  CHECK(nll.within[1].regret == Approx(3));
  CHECK(nll.within[1].chosen == 3);
  CHECK(nll.within[1].best == 5);
  CHECK(found.metrics[1].within[1].rho == Approx(1));  // recall: higher is better
  CHECK(found.ceiling[0] == Approx(0.5));
  CHECK(found.ceiling[1] == Approx(1));
  CHECK_THROWS_AS(assess_fidelity(grid({"window", "sink"}, {"8"}), texts), std::invalid_argument);
}

TEST_CASE("A text is captured, replayed and run over the same ids") {
  const std::filesystem::path model = KVLAB_SOURCE_DIR "/engine/models/tiny";
  const auto backend = load_backend(Device::cpu, model, 2);
  const Tokenizer tokenizer = Tokenizer::load(model / "tokenizer.json");
  auto ids =
      tokenizer.encode(read_text_file(KVLAB_SOURCE_DIR "/tools/demo/prompt.txt", 1 << 20), false);
  ids.resize(200);
  const OutputSketch sketch = output_sketch(model, kSketchSeed, 2);
  const test::TemporaryFolder folder;
  const auto configs = grid({"window", "sink", "h2o"}, {"16", "200"});
  const Sweep sweep = sweep_by_layers(Model::load(model, 2));
  const FidelityText text = measure_fidelity(*backend, sweep, "prompt", ids, configs,
                                             {.prompt_tokens = 64,
                                              .sketch = sketch,
                                              .traces = folder.path(),
                                              .threads = 2,
                                              .progress = {}});
  CHECK(open_verified_trace(folder / "prompt", 2).has_residuals());
  const auto& residual = text.figures.at("residual_error");
  for (std::size_t c = 0; c < 3; ++c) {
    CHECK(residual[c] > 0);
    CHECK(text.kl[c] > 0);
    CHECK(residual[c + 3] == 0);  // a budget for every token; squeezed positions differ by rounding
  }
  CHECK(text.kl[3] == 0);
}

}  // namespace
}  // namespace kvlab
