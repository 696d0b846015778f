#include "engine/sampler.hpp"

#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <vector>

#include "tests/catch.hpp"

using namespace kvlab;

namespace {

std::map<std::int32_t, double> frequencies(SamplingOptions options,
                                           const std::vector<float>& logits) {
  constexpr int kSamples = 20000;
  Sampler sampler(options);
  std::map<std::int32_t, double> shares;
  for (int i = 0; i < kSamples; ++i) shares[sampler.pick(logits)] += 1.0 / kSamples;
  return shares;
}

const std::vector<float> kLogits{0.0f, 2.0f, 1.0f, -1.0f, 2.0f};

}  // namespace

TEST_CASE("Greedy sampling takes the most likely token, and the lowest id among equal ones") {
  Sampler sampler({});
  CHECK(sampler.pick(kLogits) == 1);
  CHECK(sampler.pick(kLogits) == 1);
}

TEST_CASE("Samples follow the softmax at the temperature") {
  const double temperature = GENERATE(0.7, 1.0, 2.0);
  double total = 0;
  for (const float logit : kLogits) total += std::exp(double{logit} / temperature);
  const auto shares = frequencies({.temperature = temperature}, kLogits);
  for (std::size_t id = 0; id < kLogits.size(); ++id)
    CHECK(shares.at(static_cast<std::int32_t>(id)) ==
          Approx(std::exp(double{kLogits[id]} / temperature) / total).margin(0.012));
}

TEST_CASE("Top-k keeps the k most likely tokens") {
  const auto shares = frequencies({.temperature = 1, .top_k = 3}, kLogits);
  CHECK(shares.size() == 3);
  CHECK(shares.count(1) + shares.count(2) + shares.count(4) == 3);
  CHECK(frequencies({.temperature = 1, .top_k = 1}, kLogits).at(1) == Approx(1));
  CHECK(frequencies({.temperature = 1, .top_k = 99}, kLogits).size() == 5);
}

TEST_CASE("Top-p keeps the fewest most likely tokens whose probabilities add up to p") {
  // The probabilities are 0.0523, 0.3865, 0.1422, 0.0192 and 0.3865.
  CHECK(frequencies({.temperature = 1, .top_p = 0.3}, kLogits).size() == 1);
  CHECK(frequencies({.temperature = 1, .top_p = 0.7}, kLogits).size() == 2);
  CHECK(frequencies({.temperature = 1, .top_p = 0.9}, kLogits).size() == 3);
  const auto both = frequencies({.temperature = 1, .top_k = 2, .top_p = 0.9}, kLogits);
  CHECK(both.size() == 2);
  CHECK(both.at(1) == Approx(0.5).margin(0.012));
}

TEST_CASE("Samples depend only on the seed and the counter") {
  std::vector<std::int32_t> first, again, other;
  Sampler a({.temperature = 1, .seed = 5}), b({.temperature = 1, .seed = 5}),
      c({.temperature = 1, .seed = 6});
  for (int i = 0; i < 50; ++i) {
    first.push_back(a.pick(kLogits));
    again.push_back(b.pick(kLogits));
    other.push_back(c.pick(kLogits));
  }
  CHECK(first == again);
  CHECK(first != other);
}

TEST_CASE("Sampling options out of range and broken logits are refused") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(Sampler({.temperature = -1}), std::invalid_argument);
  CHECK_THROWS_AS(Sampler({.temperature = nan}), std::invalid_argument);
  CHECK_THROWS_AS(Sampler({.top_p = 0}), std::invalid_argument);
  CHECK_THROWS_AS(Sampler({.top_p = 1.5}), std::invalid_argument);
  const std::vector<float> broken(4, std::numeric_limits<float>::quiet_NaN());
  CHECK_THROWS_AS(Sampler({}).pick(broken), std::runtime_error);
}
