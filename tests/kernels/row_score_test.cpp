#include "kernels/row_score.hpp"

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <vector>

#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

/// The scores in float64, from the definition.
ScoredRow reference(std::span<const float> baseline, std::span<const float> logits,
                    std::int32_t next) {
  if (next < 0) return {};
  const auto lse = [](std::span<const float> row) {
    const double largest = *std::ranges::max_element(row);
    double sum = 0;
    for (const float logit : row) sum += std::exp(logit - largest);
    return largest + std::log(sum);
  };
  const auto first = [](std::span<const float> row) {
    return std::ranges::max_element(row) - row.begin();
  };
  const double own = lse(logits), wanted = lse(baseline);
  double kl = 0;
  for (std::size_t i = 0; i < logits.size(); ++i)
    kl += std::exp(baseline[i] - wanted) * ((baseline[i] - wanted) - (logits[i] - own));
  return {.nll = own - static_cast<double>(logits[static_cast<std::size_t>(next)]),
          .kl = kl,
          .same_first = first(baseline) == first(logits),
          .first = static_cast<std::int32_t>(first(logits))};
}

/// Rows of logits and the baseline rows with which they are compared. There are fewer baseline
/// rows, so several rows share one. The scores are poisoned at first.
class Scores {
 public:
  Scores(std::size_t rows, std::size_t yardsticks, std::size_t vocab, float spread, bool ties)
      : vocab_(vocab) {
    std::mt19937 random(static_cast<unsigned>(rows * vocab));
    std::normal_distribution<float> normal(0, spread);
    for (auto [values, count] : {std::pair{&logits_, rows}, {&yardstick_, yardsticks}})
      for (std::size_t i = 0; i < count * vocab; ++i) {
        const float logit = std::clamp(normal(random), -80.0f, 80.0f);
        values->push_back(ties ? std::round(logit) : logit);
      }
    for (std::size_t row = 0; row < rows; ++row) {
      row_yardstick_.push_back(static_cast<std::int32_t>(row % yardsticks));
      next_.push_back(row % 7 == 5 ? -1 : static_cast<std::int32_t>(random() % vocab));
    }
    // The first row equals its baseline row, so its KL is 0 and its most probable token is the
    // same.
    std::copy_n(yardstick_.begin(), vocab, logits_.begin());
    upload();
  }

  cudaError_t enqueue(cudaStream_t stream) const {
    return score_rows({.rows = static_cast<int>(next_.size()),
                       .vocab = static_cast<int>(vocab_),
                       .logits = device_logits_->data(),
                       .baseline = device_yardstick_->data(),
                       .baseline_rows = device_row_yardstick_->data(),
                       .next = device_next_->data(),
                       .scores = device_scores_->data()},
                      stream);
  }
  void poison() {
    check_cuda(cudaMemset(device_scores_->data(), 0xFF, next_.size() * sizeof(ScoredRow)));
  }
  std::vector<ScoredRow> scores() const { return device_scores_->to_host(); }

  void check() const {
    const std::vector<ScoredRow> scored = scores();
    int wrong = 0;
    for (std::size_t row = 0; row < next_.size(); ++row) {
      const auto baseline_row = static_cast<std::size_t>(row_yardstick_[row]);
      const ScoredRow wanted =
          reference(std::span(yardstick_).subspan(baseline_row * vocab_, vocab_),
                    std::span(logits_).subspan(row * vocab_, vocab_), next_[row]);
      const auto near = [](double a, double b) {
        return std::abs(a - b) <= 2e-6 * (1 + std::abs(b));
      };
      wrong += !near(scored[row].nll, wanted.nll) || !near(scored[row].kl, wanted.kl) ||
               scored[row].same_first != wanted.same_first || scored[row].first != wanted.first;
    }
    CAPTURE(next_.size(), vocab_);
    CHECK(wrong == 0);
    CHECK(scored[0].same_first == 1);
    CHECK(std::abs(scored[0].kl) < 1e-9);
  }

  /// Changes the next tokens, whose likelihood is scored.
  void turn() {
    for (std::int32_t& id : next_) id = (id + 2) % static_cast<std::int32_t>(vocab_);
    device_next_->assign(next_);
  }

 private:
  void upload() {
    device_logits_.emplace(std::span<const float>(logits_));
    device_yardstick_.emplace(std::span<const float>(yardstick_));
    device_row_yardstick_.emplace(std::span<const std::int32_t>(row_yardstick_));
    device_next_.emplace(std::span<const std::int32_t>(next_));
    device_scores_.emplace(next_.size());
    poison();
  }

  std::size_t vocab_;
  std::vector<float> logits_, yardstick_;
  std::vector<std::int32_t> row_yardstick_, next_;
  std::optional<DeviceArray<float>> device_logits_, device_yardstick_;
  std::optional<DeviceArray<std::int32_t>> device_row_yardstick_, device_next_;
  std::optional<DeviceArray<ScoredRow>> device_scores_;
};

}  // namespace

TEST_CASE("row scores refuse missing arrays") {
  CHECK(score_rows({}, nullptr) == cudaErrorInvalidValue);
}

TEST_CASE("scores of rows agree with float64, plain and in a graph", "[gpu][small]") {
  if (!has_device()) return skip("no CUDA device");
  for (const std::size_t vocab : {1, 2, 31, 255, 256, 257, 8192, 32003})
    for (const bool ties : {false, true})
      for (const float spread : {1.0f, 40.0f}) {
        Scores run(23, 5, vocab, spread, ties);
        const Stream stream;
        check_cuda(run.enqueue(stream.get()));
        run.check();
        CapturedGraph graph([&](cudaStream_t s) { return run.enqueue(s); });
        for (int again = 0; again < 2; ++again) {
          run.turn();
          run.poison();
          graph.launch();
          run.check();
        }
      }
}

TEST_CASE("scores of rows have equal bits in every run", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const Scores run(300, 40, 8192, 4, false);
  check_cuda(run.enqueue(nullptr));
  const std::vector<ScoredRow> once = run.scores();
  for (int again = 0; again < 200; ++again) {
    check_cuda(run.enqueue(nullptr));
    const std::vector<ScoredRow> scored = run.scores();
    int different = 0;
    for (std::size_t row = 0; row < once.size(); ++row)
      different += scored[row].nll != once[row].nll || scored[row].kl != once[row].kl;
    REQUIRE(different == 0);
  }
}
