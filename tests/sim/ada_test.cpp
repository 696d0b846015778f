// Compares Ada-KV's budgets of a layer's heads with an implementation that removes tokens one by
// one.
#include <numeric>
#include <random>

#include "policies/budgets/layer_budgets.hpp"
#include "tests/catch.hpp"
#include "tests/sim/differential.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

using Heads = std::vector<std::vector<EvictionKey>>;

/// Removes tokens one by one until the layer has no more tokens than allowed. Each removed token is
/// the first victim among the heads that may lose a token, because they keep at least a fifth of
/// the mean budget afterwards.
std::vector<std::uint32_t> one_by_one(Heads heads, std::uint32_t mean) {
  const auto live = [&] {
    std::size_t sum = 0;
    for (const auto& head : heads) sum += head.size();
    return sum;
  };
  if (live() <= heads.size() * (mean - 1)) return std::vector<std::uint32_t>(heads.size(), mean);
  while (live() > heads.size() * (mean - 1)) {
    std::size_t from = heads.size(), age = 0;
    for (std::size_t h = 0; h < heads.size(); ++h)
      for (std::size_t i = 0; i < heads[h].size(); ++i)
        if (5 * (heads[h].size() + 1) > mean && 5 * heads[h].size() >= mean &&
            (from == heads.size() || heads[h][i] < heads[from][age]))
          from = h, age = i;
    REQUIRE(from < heads.size());
    heads[from].erase(heads[from].begin() + static_cast<std::ptrdiff_t>(age));
  }
  std::vector<std::uint32_t> budgets;
  for (const auto& head : heads) budgets.push_back(static_cast<std::uint32_t>(head.size()) + 1);
  return budgets;
}

TEST_CASE("under ada() a layer's heads share its slots by rank, and each keeps at least a fifth") {
  std::mt19937 rng(7);
  for (int round = 0; round < 300; ++round) {
    Heads heads(1 + rng() % 4);
    const std::uint32_t mean = 1 + rng() % 14;
    for (auto& head : heads) {
      const std::uint32_t tokens = rng() % 25, scale = 1 + rng() % 3;
      for (std::uint32_t t = 0; t < tokens; ++t)
        head.push_back({t + 3 > tokens ? 1u : t < 1 ? 2u : 0u, scale * (rng() % 40), t});
    }
    const auto budgets = ada_budgets(heads, mean);
    CHECK(budgets == one_by_one(heads, mean));
    for (std::size_t h = 0; h < heads.size(); ++h)
      if (heads[h].size() >= mean) CHECK(5 * budgets[h] >= mean);
  }
}

/// The mass that a prompt's queries give each token of a KV head, in units of 2^-32.
std::vector<std::uint64_t> prompt_mass(const brute::Simulator& exact, std::uint32_t layer,
                                       std::uint32_t kv_head, std::uint32_t prompt) {
  const std::uint32_t group = exact.sequence().group();
  std::vector<std::uint64_t> mass(prompt);
  for (std::uint32_t q = kv_head * group; q < (kv_head + 1) * group; ++q)
    for (std::uint32_t t = 0; t < prompt; ++t)
      for (std::uint32_t j = 0; j <= t; ++j)
        mass[j] += static_cast<std::uint64_t>(
            std::llround(std::ldexp(exact.probabilities(layer, q)[t][j], 32)));
  return mass;
}

TEST_CASE("a replay under ada() keeps what each head keeps alone with its budget") {
  constexpr std::uint32_t kPrompt = 60, kMean = 14, kTokens = 110;
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(
      folder / "trace", {.layers = 2,
                         .query_heads = 6,
                         .kv_heads = 3,
                         .head_size = 16,
                         .segments = {{0, kPrompt, SegmentKind::prompt},
                                      {kPrompt, kTokens - kPrompt, SegmentKind::decode}},
                         .seed = 21});
  const brute::Simulator exact(brute::load(trace));
  CacheConfig config{.policy = parse_policy("h2o:recent=4"), .budget = parse_budget("ada(14)")};
  bool differ = false;
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    Heads heads(3);
    for (std::uint32_t h = 0; h < 3; ++h) {
      const auto mass = prompt_mass(exact, layer, h, kPrompt);
      for (std::uint32_t t = 0; t < kPrompt; ++t)
        heads[h].push_back({t + 4 > kPrompt ? 1u : 0u, mass[t], t});
    }
    const auto budgets = one_by_one(heads, kMean);
    CHECK(std::accumulate(budgets.begin(), budgets.end(), 0u) == 3 * kMean);
    differ = differ || budgets != std::vector<std::uint32_t>(3, kMean);
    for (std::uint32_t h = 0; h < 3; ++h) {
      const auto outcome =
          exact.run({.policy = "h2o", .budget = budgets[h], .recent = 4, .chunk = 0});
      INFO("layer " << layer << " head " << h << " budget " << budgets[h]);
      check_sets(every_set(trace, 0, config, {}, layer, h), outcome.caches[layer][h].kept);
    }
  }
  CHECK(differ);

  // All heads of a layer together have as many bytes as with the mean budget.
  const std::vector<CacheConfig> sweep{
      config, {.policy = config.policy, .budget = {.extent = tokens(kMean)}}};
  const ReplayResult result = replay(trace, 0, sweep, {.threads = 2});
  CHECK(result.budget_tokens == std::vector<std::uint32_t>{kMean, kMean});
  std::vector<double> bytes(2);
  for (const Measurement& m : result.measurements)
    if (m.metric == "kv_bytes" && m.layer == -1) bytes[m.config] = m.value;
  CHECK(bytes[0] == bytes[1]);
}

}  // namespace
}  // namespace kvlab
