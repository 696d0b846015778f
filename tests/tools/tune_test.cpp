// Tests of the sweep of `kvlab tune`, of successive halving, and of the whole command.
#include "engine/evaluation/tune/tune.hpp"

#include <algorithm>
#include <cmath>

#include "engine/backend.hpp"
#include "engine/capture.hpp"
#include "engine/evaluation/pages.hpp"
#include "tests/catch.hpp"
#include "tests/error_of.hpp"
#include "tests/traces/temporary_folder.hpp"
#include "traces/base/files.hpp"
#include "traces/base/json.hpp"

namespace kvlab {
namespace {

TEST_CASE("A bare name stands for its variants; a name with settings stands for itself") {
  std::vector<std::string> texts;
  for (const PolicySpec& spec : policy_variants("h2o", 64, {})) texts.push_back(spec.text());
  CHECK(texts.size() == 8);
  CHECK(std::ranges::find(texts, "h2o:sinks=4:recent=90%") != texts.end());
  CHECK(std::ranges::find(texts, "h2o:sinks=0:recent=50%") != texts.end());
  CHECK(policy_variants("lru", 64, {}).size() == 10);  // by default it protects no recent tokens
  // window always evicts the oldest token first, so only the number of sinks varies.
  CHECK(policy_variants("window", 64, {}).size() == 2);
  REQUIRE(policy_variants("h2o:recent=10%", 64, {}).size() == 1);
  CHECK(policy_variants("h2o:recent=10%", 64, {})[0].text() == "h2o:sinks=0:recent=10%");
  CHECK(policy_variants("h2o", 4, {}).size() == 4);  // variants with four sinks do not fit
  CHECK_THROWS_AS(policy_variants("full", 64, {}), std::invalid_argument);
  CHECK_THROWS_AS(policy_variants("h2o:sinks=64", 64, {}), std::invalid_argument);
  const auto names = tunable_policies({});
  CHECK(std::ranges::find(names, "random") == names.end());
  CHECK(std::ranges::find(names, "h2o") != names.end());
  // The variants have the policy's default protected tokens, and the protected tokens that are
  // tried for all policies.
  texts.clear();
  for (const PolicySpec& spec : policy_variants("nacl", 200, {})) texts.push_back(spec.text());
  CHECK(std::ranges::find(texts, parse_policy("nacl").text()) != texts.end());
  for (const PolicySpec& spec : policy_variants("roco", 200, {})) texts.push_back(spec.text());
  CHECK(std::ranges::find(texts, parse_policy("roco:sinks=4").text()) != texts.end());
}

TEST_CASE("The standard tier plans include 16 bits, and each can be parsed") {
  std::vector<std::string> texts;
  for (const char* const text : kStandardTierPlans) texts.push_back(parse_tier_plan(text).text());
  CHECK(parse_tier_plan(kStandardTierPlans[0]).is_plain());
  CHECK(std::ranges::equal(texts, kStandardTierPlans));
}

TEST_CASE("Parameters are tried around their defaults, within their range") {
  const auto near = [](double standard, double min_value, double max_value) {
    return parameter_values(standard, min_value, max_value);
  };
  const auto decay = near(0.99, 0, 1);
  REQUIRE(decay.size() == 3);
  CHECK(decay[0] == Approx(0.96));
  CHECK(decay[2] == Approx(0.9975));
  CHECK(near(0.98, 0, 1) == std::vector<double>{0.92, 0.98, 0.995});
  CHECK(near(32, 1, 4096) == std::vector<double>{8, 32, 128});
  CHECK(near(2, 1, 4) == std::vector<double>{1, 2, 4});
  CHECK(near(0, 0, 10) == std::vector<double>{0});
}

TEST_CASE("Rounds use a quarter of the texts, another quarter, then the rest") {
  using Rounds = std::vector<std::vector<std::size_t>>;
  CHECK(halving_texts(1) == Rounds{{0}});
  CHECK(halving_texts(3) == Rounds{{0}, {1}, {2}});
  CHECK(halving_texts(8) == Rounds{{0, 1}, {2, 3}, {4, 5, 6, 7}});
}

/// The KL of each token for configurations with the given means. All configurations have the same
/// noise, and in addition each one has its own noise of size `own`.
HalvingRunner invented(const std::vector<double>& means, double own = 0.05) {
  return [means, own](std::size_t text, std::span<const std::size_t> configurations) {
    std::vector<std::vector<double>> scores;
    for (const std::size_t configuration : configurations) {
      auto& tokens = scores.emplace_back();
      for (std::size_t i = 0; i < 1024; ++i) {
        const auto place = static_cast<double>(i + 1024 * text);
        tokens.push_back(means[configuration] + std::sin(place) +
                         own * std::sin(place * static_cast<double>(configuration + 2) * 0.7));
      }
    }
    return scores;
  };
}

TEST_CASE("Successive halving finds the best configuration with a quarter of the work") {
  std::vector<double> means(40);
  for (std::size_t i = 0; i < means.size(); ++i)
    means[i] =
        1 + 0.05 * std::fabs(static_cast<double>(i) - 5);  // the offline replay ranks it sixth
  const Halving halving = successive_halving(
      {.configurations = 40, .lengths = std::vector<std::uint64_t>(8, 1024)}, invented(means));
  CHECK(halving.first == std::vector<std::size_t>{5});
  CHECK(halving.exhaustive == 41 * 8 * 1024);
  CHECK(halving.work <= halving.exhaustive / 4);
  std::uint64_t work = 0;
  for (const HalvingRound& round : halving.rounds)
    work += round.texts.size() * 1024 * (round.entries.size() + 1);
  CHECK(halving.work == work);
  CHECK(halving.rounds.front().entries.front().configuration == 5);
}

TEST_CASE("Successive halving stops if more text would not make the rest significantly different") {
  const std::vector<double> means{1, 1, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
  const Halving halving = successive_halving(
      {.configurations = 16, .lengths = std::vector<std::uint64_t>(4, 1024)}, invented(means, 0.5));
  std::vector<std::size_t> first = halving.first;
  std::ranges::sort(first);
  CHECK(first.size() >= 2);
  CHECK(std::ranges::all_of(first, [](std::size_t configuration) { return configuration < 3; }));
  CHECK(halving.end == HalvingEnd::alike);
  CHECK(halving.rounds.size() == 1);
}

TEST_CASE("Successive halving continues if more text may make the rest significantly different") {
  // The lead of the first configuration is not significant after two texts. The same lead would be
  // significant after all texts.
  const std::vector<double> means{1, 1.03, 3, 3, 3, 3, 3, 3};
  const HalvingRunner run = [&](std::size_t text, std::span<const std::size_t> configurations) {
    std::vector<std::vector<double>> scores;
    for (const std::size_t configuration : configurations) {
      const double own = configuration == 1 ? text % 2 == 0 ? 0.003 : -0.003 : 0;
      scores.emplace_back(1024, means[configuration] + own);
    }
    return scores;
  };
  const HalvingInput field{.configurations = 8, .lengths = std::vector<std::uint64_t>(8, 1024)};
  const Halving halving = successive_halving(field, run);
  CHECK_FALSE(halving.rounds.front().entries[1].from_lowest.significantly_different());
  CHECK(halving.rounds.size() > 1);
  CHECK(halving.end != HalvingEnd::alike);

  // One text with too few tokens gives no interval. If all configurations have equal scores on two
  // texts, successive halving ends, because scores on other texts may be equal, too.
  const Halving brief =
      successive_halving({.configurations = 3, .lengths = {2, 2, 2}},
                         [](std::size_t, std::span<const std::size_t> configurations) {
                           return std::vector(configurations.size(), std::vector<double>(2, 1.0));
                         });
  CHECK(brief.rounds.size() == 2);
  CHECK(brief.end == HalvingEnd::alike);
}

TEST_CASE("A small lead on the first text decides nothing") {
  const HalvingRunner run = [](std::size_t text, std::span<const std::size_t> configurations) {
    std::vector<std::vector<double>> scores;
    for (const std::size_t configuration : configurations) {
      // Compared with the second configuration, the first is 2% better on two texts and 10% worse
      // on the others. All other configurations are far worse.
      const double mean = configuration > 1 ? 3 : configuration == 1 ? 1.02 : text < 2 ? 1.0 : 1.12;
      scores.emplace_back(1024, mean);
    }
    return scores;
  };
  const Halving halving = successive_halving(
      {.configurations = 16, .lengths = std::vector<std::uint64_t>(8, 1024)}, run);
  CHECK(halving.rounds.front().entries.front().configuration == 0);
  CHECK(halving.first == std::vector<std::size_t>{1});
}

TEST_CASE("Configurations dropped by the work limit are not called significantly worse") {
  // The differences are too small for an elimination, and large enough to continue with more texts.
  std::vector<double> means;
  for (std::size_t i = 0; i < 24; ++i) means.push_back(1 + 0.02 * static_cast<double>(i % 3));
  const Halving halving = successive_halving(
      {.configurations = 24, .lengths = std::vector<std::uint64_t>(4, 1024)}, invented(means));
  CHECK(halving.limited);
  std::size_t spared = 0, next = 0;
  for (const HalvingEntry& entry : halving.rounds[0].entries) {
    spared += entry.status == HalvingStatus::dropped;
    next += entry.status == HalvingStatus::stays;
  }
  CHECK(spared > 0);
  CHECK(next == halving.rounds[1].entries.size());
}

TEST_CASE("Tuning the bundled model gives a policy file with its evidence") {
  const std::filesystem::path directory = KVLAB_SOURCE_DIR "/engine/models/tiny";
  const Model model = Model::load(directory, 2);
  const auto backend = cpu_backend(model, 2);
  const Tokenizer tokenizer = Tokenizer::load(directory / "tokenizer.json");
  TuneRequest request;
  for (const char* name : {"carroll-alice", "austen-emma"}) {
    const std::string path = std::string(KVLAB_SOURCE_DIR "/tools/texts/") + name + ".txt";
    auto ids = tokenizer.encode(read_text_file(path, 1 << 20), false);
    ids.resize(300);
    request.texts.push_back({.name = name, .ids = ids, .prompt_tokens = 100, .trace = {}});
  }
  for (const char* policy : {"window", "lru", "h2o", "sink"})
    for (PolicySpec& spec : policy_variants(policy, 32, {}))
      request.sweep.push_back(
          {.policy = spec, .budget = parse_budget("32"), .positions = spec.entry->info.positions});
  request.threads = 2;
  request.task_accuracy = {.tasks = {{{.kind = TaskKind::passkey}, 20}}, .samples = 1};
  double done = 0;
  request.progress = [&](double share) { done = share; };
  const OutputSketch sketch = output_sketch(directory, kSketchSeed, 2);
  const Tuning tuning = tune(*backend, layer_sweep_runner(model), sketch, tokenizer, request);
  CHECK(tuning.metric == "residual_error");
  CHECK(tuning.halving.work <= tuning.halving.exhaustive / 4);
  CHECK(done == 1);
  CHECK(tuning.finalists.front() == tuning.judged_configs[tuning.recommendation.choice]);
  REQUIRE(tuning.evaluated.size() == 1);
  CHECK(tuning.evaluated[0].samples() == 5);
  // At least one variant of every policy is a finalist, and so are all variants with a similar KL.
  for (const char* policy : {"window", "lru", "h2o", "sink"})
    CHECK(std::ranges::any_of(tuning.finalists, [&](std::size_t config) {
      return request.sweep[config].policy.name == policy;
    }));

  const PolicyFile file = policy_file_of(tuning, request, *backend);
  const test::TemporaryFolder folder;
  write_policy_file(folder / "policy.json", file);
  const PolicyFile read = read_policy_file(folder / "policy.json");
  CHECK(read.cache.policy.text() == request.sweep[tuning.winner].policy.text());
  CHECK(read.cache.budget.extent.tokens == 32);
  CHECK((*JsonValue(read.run)).at("rounds").size() == tuning.halving.rounds.size());
  CHECK(read.run["criteria"]["deployed"] == read.cache.policy.text());
  CHECK(read.run["layers"] == "all");
  const std::string path = (folder / "policy.json").string();
  const auto page = tune_page(parse_json(read_text_file(path, 1 << 20), path), path).data;
  CHECK(page["facts"]["criteria"]["distribution"].is_string());
  CHECK(page["facts"]["criteria"]["evaluated"].size() == 1);
  CHECK(page["facts"]["rounds"].size() == tuning.halving.rounds.size());
  CHECK(page["facts"]["scores"].size() == read.run["scores"].size());
  CHECK(page["recommendations"][0]["warnings"].dump().find("so confidence intervals are wide") !=
        std::string::npos);
  CHECK(read.run["criteria"]["policies"].size() == tuning.finalists.size());
  CHECK(read.run["scores"][0]["policy"] == "full");
  CHECK(read.run["scores"][0]["kl"] == 0);
  CHECK(read.run["scores"][1]["perplexity"] > read.run["scores"][0]["perplexity"]);
  CHECK(read.run["scores"][1]["same_first"] < 1);
  CHECK(read.run["recommendation"]["warnings"].dump().find("tokens were scored") !=
        std::string::npos);

  // In the last round of successive halving, no configuration has a lower KL than the winner.
  const auto& entries = tuning.halving.rounds.back().entries;
  for (const HalvingEntry& entry : entries) CHECK(entry.kl >= entries.front().kl);

  // Configurations that keep all decoded tokens are over budget, so they do not take part.
  TuneRequest alike = request;
  alike.task_accuracy.tasks.clear();
  alike.sweep.clear();
  for (const char* policy : {"window:once:recent=31", "window:once", "sink", "window"})
    alike.sweep.push_back({.policy = parse_policy(policy), .budget = parse_budget("32")});
  const Tuning kept = tune(*backend, layer_sweep_runner(model), sketch, tokenizer, alike);
  CHECK(kept.memory[0].peak == kept.memory[1].peak);
  CHECK(kept.memory[0].peak > 5 * kept.memory[2].peak);
  CHECK(kept.over_budget.size() == 2);
  CHECK(kept.winner >= 2);
  const auto evidence = policy_file_of(kept, alike, *backend).run;
  CHECK(evidence["over_budget"].size() == 2);
  CHECK(evidence["recommendation"]["note"] == "Task accuracy was not measured.");
  CHECK(evidence["criteria"]["why"] == "task accuracy was not measured");
  // If all configurations are over budget, all of them take part.
  alike.sweep.resize(2);
  CHECK(tune(*backend, layer_sweep_runner(model), sketch, tokenizer, alike).over_budget.empty());

  request.metric = "nothing";
  CHECK(test::error_of<std::invalid_argument>([&] {
          tune(*backend, layer_sweep_runner(model), sketch, tokenizer, request);
        }).find("nothing") != std::string::npos);
}

}  // namespace
}  // namespace kvlab
