// Compares oracle_residual with the same greedy choice in float64, which computes the attention
// over each live set explicitly.
#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "sim/replay.hpp"
#include "tests/catch.hpp"
#include "tests/sim/brute_force.hpp"
#include "tests/sim/random_trace.hpp"
#include "tests/traces/temporary_folder.hpp"

namespace kvlab {
namespace {

constexpr std::uint32_t kAhead = 32, kDirections = 16;

/// The greedy choice for one KV head: the victim is the token whose eviction increases the error
/// the least.
class GreedyByHand {
 public:
  GreedyByHand(const brute::Simulator& sim, std::uint32_t layer, std::uint32_t kv_head)
      : sim_(sim), s_(sim.sequence()), layer_(layer), kv_head_(kv_head) {}

  /// The live tokens while each query attends.
  Sets run(std::uint32_t budget, std::uint32_t prompt) const {
    Sets kept;
    std::set<std::uint32_t> live;
    for (std::uint32_t now = 0; now < s_.tokens;) {
      while (live.size() > budget - 1) live.erase(first_victim(live, now));
      const std::uint32_t end = now < prompt ? prompt : now + 1;
      for (; now < end; ++now) {
        live.insert(now);
        kept.emplace_back(live.begin(), live.end());
      }
    }
    return kept;
  }

 private:
  std::uint32_t first_victim(const std::set<std::uint32_t>& live, std::uint32_t now) const {
    std::uint32_t first = 0;
    double min_change = std::numeric_limits<double>::infinity();
    for (const std::uint32_t candidate : live) {
      std::set<std::uint32_t> rest = live;
      rest.erase(candidate);
      double change = 0;
      for (std::uint32_t t = now; t < std::min(now + kAhead, s_.tokens); ++t) {
        rest.insert(t);
        change += change_at(t, rest);
      }
      if (change < min_change) min_change = change, first = candidate;
    }
    return first;
  }

  double change_at(std::uint32_t query, const std::set<std::uint32_t>& kept) const {
    brute::Vector error(kDirections);
    for (std::uint32_t g = 0; g < s_.group(); ++g) {
      const std::uint32_t head = kv_head_ * s_.group() + g;
      const brute::Vector& p = sim_.probabilities(layer_, head)[query];
      double sum = 0;
      for (const std::uint32_t token : kept) sum += p[token];
      for (std::uint32_t token = 0; token <= query; ++token) {
        const double off = p[token] - (kept.contains(token) ? p[token] / sum : 0);
        for (std::uint32_t d = 0; d < s_.head_size; ++d)
          for (std::uint32_t c = 0; c < kDirections; ++c)
            error[c] += off * s_.v[layer_][kv_head_][token][d] * s_.sketch[layer_][head][d][c];
      }
    }
    return std::inner_product(error.begin(), error.end(), error.begin(), 0.0) /
           s_.norm2[layer_][query];
  }

  const brute::Simulator& sim_;
  const brute::Sequence& s_;
  std::uint32_t layer_, kv_head_;
};

CacheConfig oracle(std::uint32_t budget, std::uint32_t chunk) {
  CacheConfig config;
  config.policy = parse_policy(kOracleResidual, replay_oracles());
  config.budget = parse_budget(std::to_string(budget));
  config.prefill = {chunk};
  return config;
}

TEST_CASE("oracle_residual keeps the greedy choice's sets, after a prompt and in steps") {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(
      folder / "trace", {.head_size = 4,
                         .segments = {{0, 24, SegmentKind::prompt}, {24, 36, SegmentKind::decode}},
                         .seed = 7});
  const brute::Simulator sim(brute::load(trace));
  for (const std::uint32_t chunk : {0u, 1u})
    for (const std::uint32_t kv_head : {0u, 1u}) {
      INFO("chunk " << chunk << ", KV head " << kv_head);
      check_sets(every_set(trace, 0, oracle(10, chunk), {}, 1, kv_head),
                 GreedyByHand(sim, 1, kv_head).run(10, chunk == 0 ? 24 : 0));
    }
}

TEST_CASE("oracle_residual adds a regret, and requires the inputs of residual_error") {
  const test::TemporaryFolder folder;
  const TraceReader trace = write_random_trace(folder / "trace", {});
  CacheConfig window = oracle(16, 0);
  window.policy = parse_policy("window");
  // This policy keeps the prompt in addition to its budget, so the oracle's budget is not its own.
  CacheConfig with_prompt = window;
  with_prompt.policy = parse_policy("window:prompt");
  const std::vector<CacheConfig> sweep{window, oracle(16, 0), with_prompt};
  const ReplayResult result = replay(trace, 0, sweep, {.layers = {}, .progress = {}});
  const auto value = [&](std::size_t config, const std::string& metric) {
    const auto row = std::ranges::find_if(result.measurements, [&](const Measurement& m) {
      return m.config == config && m.layer == -1 && m.metric == metric;
    });
    REQUIRE(row != result.measurements.end());
    return row->value;
  };
  const double regret = value(0, "residual_error") - value(1, "residual_error");
  CHECK(value(0, "regret_residual") == Approx(regret));
  CHECK(regret > 0);
  CHECK(std::ranges::none_of(result.measurements, [](const Measurement& m) {
    return m.config == 2 && m.metric.starts_with("regret_");
  }));
  const TraceReader plain = write_random_trace(folder / "plain", {.residuals = false});
  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH(replay(plain, 0, sweep, {.layers = {}, .progress = {}}),
                    ContainsSubstring("oracle_residual: the trace"));
}

}  // namespace
}  // namespace kvlab
