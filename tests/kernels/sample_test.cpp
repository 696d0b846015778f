#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <vector>

#include "engine/sampler.hpp"
#include "kernels/pointwise.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

/// Rows of logits on the device, each with its options. Each call of sample() advances their
/// counters.
class Rows {
 public:
  Rows(std::span<const float> logits, std::size_t vocab, std::span<const SamplingOptions> options)
      : rows_(options.size()),
        vocab_(vocab),
        logits_(logits),
        temperature_(each<float>(options, [](auto& o) { return float(o.temperature); })),
        top_p_(each<float>(options, [](auto& o) { return float(o.top_p); })),
        top_k_(each<std::int32_t>(options, [](auto& o) { return std::int32_t(o.top_k); })),
        seed_(each<std::uint64_t>(options, [](auto& o) { return o.seed; })),
        counter_(rows_),
        ids_(rows_),
        workspace_(sample_workspace(int(rows_), int(vocab))) {
    check_cuda(cudaMemset(workspace_.data(), 0xFF, sample_workspace(int(rows_), int(vocab))));
  }
  cudaError_t enqueue(cudaStream_t stream) const {
    return sample({.rows = int(rows_),
                   .vocab = int(vocab_),
                   .logits = logits_.data(),
                   .temperature = temperature_.data(),
                   .top_p = top_p_.data(),
                   .top_k = top_k_.data(),
                   .seed = seed_.data(),
                   .counter = counter_.data(),
                   .ids = ids_.data(),
                   .workspace = workspace_.data()},
                  stream);
  }
  std::vector<std::int32_t> pick() const {
    check_cuda(enqueue(nullptr));
    return ids();
  }
  std::vector<std::int32_t> ids() const { return ids_.to_host(); }
  std::vector<std::uint64_t> counters() const { return counter_.to_host(); }

 private:
  template <class T, class Get>
  static std::vector<T> each(std::span<const SamplingOptions> options, Get get) {
    std::vector<T> values;
    for (const SamplingOptions& o : options) values.push_back(static_cast<T>(get(o)));
    return values;
  }
  std::size_t rows_, vocab_;
  DeviceArray<float> logits_, temperature_, top_p_;
  DeviceArray<std::int32_t> top_k_;
  DeviceArray<std::uint64_t> seed_, counter_;
  DeviceArray<std::int32_t> ids_;
  DeviceArray<std::byte> workspace_;
};

/// Normal logits, or 16 discrete values, so that there are many ties.
std::vector<float> random_logits(std::size_t count, bool ties, std::mt19937& random) {
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(count);
  for (float& logit : logits) logit = ties ? std::round(normal(random)) : normal(random);
  return logits;
}

std::vector<SamplingOptions> many_options() {
  std::vector<SamplingOptions> options;
  std::uint64_t seed = 100;
  for (const double temperature : {0.0, 0.5, 1.0, 3.0})
    for (const std::uint32_t top_k : {0u, 1u, 2u, 50u, 100'000u})
      for (const double top_p : {1.0, 0.9, 0.25})
        options.push_back({temperature, top_k, double(float(top_p)), seed++});
  return options;
}

}  // namespace

TEST_CASE("the device samples the ids that the host samples, for all options", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(1);
  constexpr int kSamples = 20;
  const std::vector<SamplingOptions> options = many_options();
  int different = 0, samples = 0;
  for (const std::size_t vocab : {1, 2, 33, 1000, 32'003})
    for (const bool ties : {false, true}) {
      const std::vector<float> logits = random_logits(vocab * options.size(), ties, random);
      const Rows rows(logits, vocab, options);
      std::vector<Sampler> host(options.begin(), options.end());
      for (int sample = 0; sample < kSamples; ++sample) {
        const auto ids = rows.pick();
        for (std::size_t row = 0; row < options.size(); ++row) {
          const std::int32_t expected =
              host[row].pick(std::span(logits).subspan(row * vocab, vocab));
          if (options[row].temperature == 0) REQUIRE(ids[row] == expected);
          different += ids[row] != expected;
          ++samples;
        }
      }
      CHECK((rows.counters() == std::vector<std::uint64_t>(options.size(), kSamples)));
    }
  INFO(different << " of " << samples << " samples differ");
  CHECK(different <= samples / 1000);  // probabilities are float32 on the device
}

TEST_CASE("a graph of sample() gives a new sample at every replay, as the host does", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  std::mt19937 random(2);
  const std::size_t vocab = 128'256;
  const std::vector<SamplingOptions> options{
      {0.8, 0, 1.0, 1}, {0.8, 40, 0.9375, 2}, {0.0, 0, 1.0, 3}, {0.8, 0, 0.9375, 4}};
  const std::vector<float> logits = random_logits(vocab * options.size(), false, random);
  const Rows rows(logits, vocab, options);
  CapturedGraph graph([&](cudaStream_t stream) { return rows.enqueue(stream); });
  std::vector<Sampler> host(options.begin(), options.end());
  int different = 0;
  for (int sample = 0; sample < 10; ++sample) {
    graph.launch();
    const auto ids = rows.ids();
    for (std::size_t row = 0; row < options.size(); ++row)
      different += ids[row] != host[row].pick(std::span(logits).subspan(row * vocab, vocab));
  }
  CHECK(different == 0);
}

TEST_CASE(
    "greedy sampling takes the lowest of equal ids, and -1 if the largest logit is not "
    "finite",
    "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  constexpr std::size_t kVocab = 70'000, kRows = 6;
  std::vector<float> logits(kVocab * kRows, -2.0f);
  logits[69'999] = logits[40'000] = 5;
  logits[1 * kVocab + 3] = kInfinity;
  logits[2 * kVocab + 60'000] = -kNan;
  std::fill_n(logits.begin() + 3 * kVocab, kVocab, -kInfinity);
  logits[4 * kVocab + 17] = -0.0f, logits[4 * kVocab + 18] = 0.0f;
  for (const double temperature : {0.0, 1e-6}) {
    const std::vector<SamplingOptions> options(
        kRows, SamplingOptions{.temperature = temperature, .top_k = 1});
    CHECK((Rows(logits, kVocab, options).pick() ==
           std::vector<std::int32_t>{40'000, -1, -1, -1, 17, 0}));
  }
}

TEST_CASE("samples follow the tempered distribution", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  const std::vector<float> logits{0.0f, 1.0f, -1.0f, 2.0f};
  constexpr std::size_t kRows = 4096;
  std::vector<float> all;
  std::vector<SamplingOptions> options;
  for (std::size_t row = 0; row < kRows; ++row) {
    all.insert(all.end(), logits.begin(), logits.end());
    options.push_back({2.0, 0, 1.0, row * 977});
  }
  std::map<std::int32_t, double> seen;
  for (const std::int32_t id : Rows(all, 4, options).pick()) seen[id] += 1.0 / kRows;
  double total = 0;
  for (const float logit : logits) total += std::exp(double(logit) / 2);
  for (std::int32_t id = 0; id < 4; ++id) {
    const double p = std::exp(double(logits[std::size_t(id)]) / 2) / total;
    CHECK(std::abs(seen[id] - p) < 4 * std::sqrt(p * (1 - p) / kRows));
  }
}
