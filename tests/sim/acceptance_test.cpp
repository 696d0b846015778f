// Tests the estimate of acceptance from KL: its correction if there are few gradient samples, and
// its formula for small errors of the logits.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <random>
#include <vector>

#include "sim/run/tabulate.hpp"
#include "tests/catch.hpp"

namespace kvlab {
namespace {

TEST_CASE("the root of a mean of few squares is unbiased after its correction") {
  CHECK(unbiased_root_factor(1) == Approx(std::sqrt(std::numbers::pi / 2)));
  CHECK(unbiased_root_factor(2) == Approx(2 / std::sqrt(std::numbers::pi)));
  CHECK(unbiased_root_factor(1024) == Approx(1).margin(3e-4));
  std::mt19937_64 random(7);
  std::normal_distribution<double> normal;
  for (const std::uint32_t samples : {1u, 2u, 3u, 4u, 8u}) {
    constexpr int kRounds = 200'000;
    double roots = 0;
    for (int round = 0; round < kRounds; ++round) {
      double squares = 0;
      for (std::uint32_t i = 0; i < samples; ++i) squares += std::pow(normal(random), 2);
      roots += std::sqrt(squares / samples);
    }
    CHECK(unbiased_root_factor(samples) * roots / kRounds == Approx(1).margin(0.01));
  }
}

TEST_CASE("the estimate of acceptance is 1 without an error, falls with KL, and ends at 0") {
  CHECK(acceptance_estimate(0, 1) == 1);
  CHECK(acceptance_estimate(0.1, 4) < acceptance_estimate(0.05, 4));
  CHECK(acceptance_estimate(0.1, 1) < acceptance_estimate(0.1, 4));
  CHECK(acceptance_estimate(100, 4) == 0);
}

std::vector<double> softmax(const std::vector<double>& logits) {
  std::vector<double> p(logits.size());
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += p[i] = std::exp(logits[i]);
  for (double& x : p) x /= sum;
  return p;
}

TEST_CASE("for small normal errors of the logits, acceptance is 1 - sqrt(KL / pi)") {
  std::mt19937_64 random(11);
  std::normal_distribution<double> normal;
  double accepted = 0, estimated = 0;
  constexpr int kRounds = 400;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<double> logits(2000), other;
    for (double& x : logits) x = normal(random);
    for (const double x : logits) other.push_back(x + 0.4 * normal(random));
    const std::vector<double> p = softmax(logits), q = softmax(other);
    double kl = 0;
    for (std::size_t i = 0; i < p.size(); ++i) {
      kl += p[i] * std::log(p[i] / q[i]);
      accepted += std::min(p[i], q[i]) / kRounds;
    }
    // Very many samples need no correction.
    estimated += acceptance_estimate(kl, 1u << 20) / kRounds;
  }
  CHECK(accepted < 0.9);
  CHECK(estimated == Approx(accepted).margin(0.005));
}

}  // namespace
}  // namespace kvlab
