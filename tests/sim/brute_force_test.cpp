// Compares the brute force with examples that were computed by hand.
#include "tests/sim/brute_force.hpp"

#include <cmath>
#include <numbers>

#include "tests/catch.hpp"

namespace kvlab::brute {
namespace {

/// One head of two dimensions without rotation. Every query gives key j a probability in proportion
/// to weights[j]. The value of token j is (j + 1, 0). The first `prompt` tokens are a prompt, and
/// the others are decoded.
Sequence weighted(const std::vector<double>& weights, std::uint32_t prompt) {
  Sequence s;
  s.head_size = 2;
  s.tokens = static_cast<std::uint32_t>(weights.size());
  s.inv_freq = {0.0f};
  s.segments = {{0, prompt, SegmentKind::prompt}, {prompt, s.tokens - prompt, SegmentKind::decode}};
  s.q.resize(1), s.k.resize(1), s.v.resize(1);
  Matrix q, k, v;
  for (double w : weights) {
    q.push_back({1, 0});
    k.push_back({std::log(w), 0});
    v.push_back({static_cast<double>(v.size()) + 1, 0});
  }
  s.q[0] = {q}, s.k[0] = {k}, s.v[0] = {v};
  return s;
}

using Kept = std::vector<std::vector<std::uint32_t>>;

const std::vector<double> kWeights{4, 1, 2, 1, 8};

Config streamed(const char* policy, std::uint32_t budget) {
  return {.policy = policy, .budget = budget, .chunk = 1};
}

double value(const MetricValues& metric_values, const char* metric) {
  return metric_values.at({-1, -1, metric}).value;
}

TEST_CASE(
    "h2o by hand: without protected tokens, the token with the least accumulated mass is "
    "evicted") {
  const Simulator sim(weighted(kWeights, 1));
  // Before token 3, tokens 0 to 2 have the masses 1 + 4/5 + 4/7, 1/5 + 1/7 and 2/7, so token 2 is
  // evicted. Query 3 then gives 4/6 to token 0, 1/6 to token 1 and 1/6 to token 3, so token 3 is
  // evicted before token 4.
  const Outcome outcome = sim.run(streamed("h2o", 3));
  REQUIRE(outcome.caches[0][0].kept == Kept{{0}, {0, 1}, {0, 1, 2}, {0, 1, 3}, {0, 1, 4}});
  REQUIRE(outcome.caches[0][0].evictions == 2);
  REQUIRE(outcome.caches[0][0].live_max == 3);
  REQUIRE(outcome.caches[0][0].live_end == 3);
  REQUIRE(static_cast<double>(outcome.caches[0][0].mass[2]) == Approx(std::ldexp(2.0 / 7, 32)));
  const MetricValues metric_values = sim.measure(outcome, Queries::decode);
  REQUIRE(value(metric_values, "recall") == Approx((1 + 1 + 6.0 / 8 + 13.0 / 16) / 4));
  REQUIRE(value(metric_values, "nll_recall") ==
          Approx((-std::log(6.0 / 8) - std::log(13.0 / 16)) / 4));
  // Each query requests all earlier tokens, because each of these has at least 1/8 of the row's
  // largest probability. These are 1 + 2 + 3 + 4 requests.
  REQUIRE(value(metric_values, "miss_rate") == Approx((0 + 0 + 1 + 2) / 10.0));
  // Only the first of the four queries is sampled for errors, and it misses no token.
  REQUIRE(value(metric_values, "output_error") == Approx(0).margin(1e-12));
  // o is the exact output, and ô the output over the kept tokens. At token 3, o = (4 + 2 + 6 + 4) /
  // 8 and ô = (4 + 2 + 4) / 6. At token 4, o = 56 / 16 and ô = 46 / 13.
  const MetricValues each = sim.measure(outcome, Queries::decode, 1);
  const double third = std::abs(2.0 - 10.0 / 6) / 2.0, fourth = std::abs(3.5 - 46.0 / 13) / 3.5;
  REQUIRE(value(each, "output_error") == Approx((third + fourth) / 4));
  REQUIRE(value(each, "layer_error") == Approx((third + fourth) / 4));
  REQUIRE(value(each, "evictions") == 2);
  REQUIRE(value(each, "kv_bytes") == 3 * 2 * 2 * 2);
  REQUIRE(value(each, "state_bytes") == 3 * (8 + 4));
  REQUIRE(each.at({-1, -1, "recall"}).count == 4);
}

TEST_CASE("protected tokens by hand: recent tokens and sinks are evicted last") {
  const Simulator sim(weighted(kWeights, 1));
  Config config = streamed("h2o", 3);
  config.recent = 2;  // the token that is appended next, and the token before it
  REQUIRE(sim.run(config).caches[0][0].kept == Kept{{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}});
  config.recent = 3;  // the whole budget: a window
  REQUIRE(sim.run(config).caches[0][0].kept[3] == std::vector<std::uint32_t>{1, 2, 3});
  Config sink = streamed("sink", 3);
  sink.sinks = 1;
  REQUIRE(sim.run(sink).caches[0][0].kept == Kept{{0}, {0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}});
}

TEST_CASE("a dense prompt is attended in full and compacted before the first decoded token") {
  const Simulator sim(weighted({4, 1, 2, 1, 8, 1}, 5));
  Config config = standard("h2o", 3);
  config.recent = 0;
  const Outcome outcome = sim.run(config);
  REQUIRE(outcome.caches[0][0].kept[4] == std::vector<std::uint32_t>{0, 1, 2, 3, 4});
  // The masses are 1 + 0.8 + 0.57 + 0.5 + 0.25 = 3.12 for token 0, 0.2 + 0.14 + 0.125 + 0.0625 =
  // 0.53 for token 1, 0.29 + 0.25 + 0.125 = 0.66 for token 2, 0.125 + 0.0625 = 0.19 for token 3,
  // and 8/16 = 0.5 for token 4.
  REQUIRE(outcome.caches[0][0].kept[5] == std::vector<std::uint32_t>{0, 2, 5});
  REQUIRE(outcome.caches[0][0].evictions == 3);
  REQUIRE(outcome.caches[0][0].live_max == 5);
  config.chunk = 2;
  // At most 2 + 2 tokens are live: {0,1}, then {0,1,2,3}. Then tokens 1 and 3 are evicted, because
  // their masses are lowest: tokens 0 to 3 have 2.87, 0.47, 0.54 and 0.125.
  const Outcome chunked = sim.run(config);
  REQUIRE(chunked.caches[0][0].kept[2] == std::vector<std::uint32_t>{0, 1, 2});
  REQUIRE(chunked.caches[0][0].kept[3] == std::vector<std::uint32_t>{0, 1, 2, 3});
  REQUIRE(chunked.caches[0][0].kept[4] == std::vector<std::uint32_t>{0, 2, 4});
}

TEST_CASE("lru by hand: the threshold is a share of the largest live entry of a row") {
  // At query 3, token 0 has less than 1% of the largest probability. Earlier queries request all
  // tokens.
  const Simulator sim(weighted({1, 2, 50, 101, 3}, 1));
  const Outcome outcome = sim.run(streamed("lru", 3));
  REQUIRE(outcome.caches[0][0].kept == Kept{{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {2, 3, 4}});
  // With a budget of 4, token 0 is evicted before token 4, because its last request was at query 2.
  // At query 3 it has 1/101 of the largest probability, and token 1 has 2/101.
  const Outcome larger = sim.run(streamed("lru", 4));
  REQUIRE(larger.caches[0][0].kept[4] == std::vector<std::uint32_t>{1, 2, 3, 4});
  REQUIRE(larger.narrowest < 0.011);  // 1/101 compared with 1%
  REQUIRE(value(sim.measure(larger, Queries::decode), "miss_rate") == 0);
}

TEST_CASE(
    "oracles by hand: the token with the least future mass is evicted, the most probable "
    "are kept") {
  const Simulator sim(weighted({1, 4, 2, 8, 1}, 1));
  REQUIRE(sim.run(streamed("oracle_attention", 3)).caches[0][0].kept ==
          Kept{{0}, {0, 1}, {0, 1, 2}, {1, 2, 3}, {1, 3, 4}});
  const Outcome top = sim.run(streamed("oracle_topk", 2));
  REQUIRE(top.queries[0][0][2].recall == Approx(6.0 / 7));
  REQUIRE(top.queries[0][0][3].recall == Approx(12.0 / 15));
  REQUIRE(top.queries[0][0][3].requested == 3);
  REQUIRE(top.queries[0][0][3].missed == 2);
}

/// One head whose logits are cosines of the distance.
Sequence turning(std::uint32_t tokens) {
  Sequence s = weighted(std::vector<double>(tokens, 1), 1);
  s.inv_freq = {1.0f};
  for (auto& row : s.k[0][0]) row = {1, 0};
  return s;
}

TEST_CASE("rotation by hand: logits depend on distances, which cache positions shorten") {
  const Sequence s = turning(6);
  const Vector y = rotate(exact_angles(s), {1, 0}, 2);
  REQUIRE(y[0] == Approx(std::cos(2.0)));
  REQUIRE(y[1] == Approx(std::sin(2.0)));
  const Simulator sim(s);
  const auto& p = sim.probabilities(0, 0);
  REQUIRE(std::log(p[5][1] / p[5][5]) == Approx(std::cos(4.0) - 1));

  Config config = streamed("sink", 3);
  config.sinks = 1;
  config.cache_positions = true;
  // The live tokens 0, 4 and 5 are at the cache positions 0, 1 and 2.
  const AtQuery at = sim.run(config).queries[0][0][5];
  const double a = std::exp(std::cos(2.0)), b = std::exp(std::cos(1.0)), c = std::exp(1.0);
  const double out = (1 * a + 5 * b + 6 * c) / (a + b + c);
  REQUIRE(std::sqrt(at.error2) == Approx(std::abs(out - sim.outputs(0, 0)[5][0])));
  REQUIRE(at.recall == Approx(p[5][0] + p[5][4] + p[5][5]));
}

TEST_CASE("the query heads of a group share one cache, which sums their masses") {
  Sequence s = weighted({4, 1, 2, 1}, 1);
  s.query_heads = 2;
  s.q[0].push_back(s.q[0][0]);
  for (auto& row : s.q[0][1]) row[0] = -1;  // the second head has weights 1 / w
  const Simulator sim(s);
  const Outcome outcome = sim.run(streamed("h2o", 4));
  // The weights of the rows of the two heads: 4 and 1/4; 4:1 and 1/4:1; 4:1:2 and 1/4:1:1/2;
  // 4:1:2:1 and 1/4:1:1/2:1.
  const double second = 1.0 / 5 + 1 / 1.25 + 1.0 / 7 + 1 / 1.75 + 1.0 / 8 + 1 / 2.75;
  REQUIRE(static_cast<double>(outcome.caches[0][0].mass[1]) == Approx(std::ldexp(second, 32)));
  REQUIRE(sim.measure(outcome, Queries::decode).at({-1, -1, "recall"}).count == 6);
}

TEST_CASE("bf16 rounding goes to nearest even") {
  REQUIRE(round_to_bits(1 + 0x1p-8, 8) == 1.0);
  REQUIRE(round_to_bits(1 + 3 * 0x1p-8, 8) == 1 + 0x1p-6);
  REQUIRE(round_to_bits(-1 - 0x1.8p-8, 8) == -1 - 0x1p-7);
  REQUIRE(round_to_bits(0, 8) == 0);
}

TEST_CASE("a jackknife of a mean is the standard error of the blocks' means") {
  std::vector<double> weights(17, 1);
  const Simulator sim(weighted(weights, 1));
  const Outcome outcome = sim.run(streamed("window", 4));
  const MetricValue recall = sim.measure(outcome, Queries::decode).at({-1, -1, "recall"});
  Vector r;  // sixteen decoded queries, one per block
  for (std::uint32_t t = 1; t < 17; ++t) r.push_back(std::min(1.0, 4.0 / (t + 1)));
  double mean = 0, variance = 0;
  for (double x : r) mean += x / 16;
  for (double x : r) variance += (x - mean) * (x - mean) / 15;
  REQUIRE(recall.value == Approx(mean));
  REQUIRE(recall.standard_error == Approx(std::sqrt(variance / 16)));
  REQUIRE(std::isnan(
      sim.measure(outcome, Queries::decode).at({-1, -1, "output_error"}).standard_error));
}

}  // namespace
}  // namespace kvlab::brute
