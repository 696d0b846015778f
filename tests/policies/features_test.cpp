// Tests of token features. The features that kvlab computes are compared with their definitions in
// float64.
#include "policies/features/features.hpp"

#include <cmath>
#include <random>

#include "policies/aged_set.hpp"
#include "tests/catch.hpp"

using namespace kvlab;

namespace {

constexpr std::uint32_t kSize = 24, kTokens = 60, kStride = 31;
const std::vector<std::string> kAll{"value_norm1", "key_norm", "key_cosine", "value_norm"};

/// Keys with several norms around a common direction; one key and one value are zero.
struct Rows {
  std::vector<float> k, v;  // [token, kStride]

  Rows() : k(kTokens * kStride, NAN), v(k) {
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (std::uint32_t t = 0; t < kTokens; ++t)
      for (std::uint32_t d = 0; d < kSize; ++d) {
        k[t * kStride + d] = t == 7 ? 0 : static_cast<float>(1 + t % 5) * (normal(rng) + 0.5f);
        v[t * kStride + d] = t == 9 ? 0 : normal(rng);
      }
  }
  KeyValueRows from(std::uint32_t first, std::uint32_t count) const {
    return {&k[first * kStride], &v[first * kStride], kStride, count};
  }
  double key(std::uint32_t t, std::uint32_t d) const {
    return static_cast<double>(k[t * kStride + d]);
  }
  double value(std::uint32_t t, std::uint32_t d) const {
    return static_cast<double>(v[t * kStride + d]);
  }
};

/// The cosine of key t with the mean of the unit keys before `end`, from its definition.
double cosine(const Rows& rows, std::uint32_t t, std::uint32_t end) {
  const auto size = [&](std::uint32_t j) {
    double squares = 0;
    for (std::uint32_t d = 0; d < kSize; ++d) squares += rows.key(j, d) * rows.key(j, d);
    return std::sqrt(squares);
  };
  double product = 0, squares = 0;
  for (std::uint32_t d = 0; d < kSize; ++d) {
    double mean = 0;
    for (std::uint32_t j = 0; j < end; ++j)
      if (size(j) > 0) mean += rows.key(j, d) / size(j) / end;
    product += mean * rows.key(t, d);
    squares += mean * mean;
  }
  return size(t) > 0 ? product / size(t) / std::sqrt(squares) : 0;
}

}  // namespace

TEST_CASE("computed features agree with their definitions") {
  const Rows rows;
  for (const std::uint32_t chunk : {1u, 13u, kTokens}) {
    FeatureMaker maker(kAll, kSize);
    for (std::uint32_t first = 0; first < kTokens; first += chunk) {
      const std::uint32_t count = std::min(chunk, kTokens - first);
      const float* const features = maker.append(rows.from(first, count), nullptr, 0);
      for (std::uint32_t t = first; t < first + count; ++t) {
        INFO("chunk " << chunk << " token " << t);
        double key2 = 0, value1 = 0, value2 = 0;
        for (std::uint32_t d = 0; d < kSize; ++d) {
          key2 += rows.key(t, d) * rows.key(t, d);
          value1 += std::fabs(rows.value(t, d));
          value2 += rows.value(t, d) * rows.value(t, d);
        }
        const float* const own = features + (t - first) * kAll.size();
        CHECK(static_cast<double>(own[0]) == Approx(value1).epsilon(1e-6));
        CHECK(static_cast<double>(own[1]) == Approx(std::sqrt(key2)).epsilon(1e-6));
        CHECK(std::fabs(static_cast<double>(own[2]) - cosine(rows, t, first + count)) < 2e-6);
        CHECK(static_cast<double>(own[3]) == Approx(std::sqrt(value2)).epsilon(1e-6));
      }
    }
  }
}

TEST_CASE("sums of features are in index order, in float32") {
  // In float32, 2^24 + 1 + 1 is rounded to 2^24, and 1 + 1 + 2^24 is exact.
  std::vector<float> late(3), early(3);
  late = {16777216.0f, 1, 1}, early = {1, 1, 16777216.0f};
  for (const auto& [value, sum] : {std::pair(late, 16777216.0f), std::pair(early, 16777218.0f)}) {
    FeatureMaker maker({"value_norm1"}, 3);
    CHECK(*maker.append({value.data(), value.data(), 3, 1}, nullptr, 0) == sum);
  }
}

TEST_CASE(
    "value_out_norm1 is computed from the output projections; without them it must be given") {
  const Rows rows;
  constexpr std::uint32_t kGroup = 3, kHidden = 21, kInputs = 2 * kGroup * kSize;
  std::mt19937 rng(5);
  std::vector<float> weights(kHidden * kInputs);  // [hidden, query_head, dim]
  for (float& w : weights) w = static_cast<float>(rng() % 2048) / 1024 - 1;
  OutputProjections output{kHidden, kGroup, kSize, {}};
  output.add_layer(2 * kGroup, [&](std::size_t row, float* to) {
    std::copy_n(&weights[row * kInputs], kInputs, to);
  });
  const std::vector<std::string> names{"value_out_norm1"};
  for (const std::uint32_t kv_head : {0u, 1u}) {
    FeatureMaker maker(names, kSize, output.weights(0, kv_head));
    const float* const features = maker.append(rows.from(0, kTokens), nullptr, 0);
    for (std::uint32_t t = 0; t < kTokens; ++t) {
      double expected = 0;
      for (std::uint32_t i = 0; i < kHidden * kGroup; ++i) {
        double product = 0;
        for (std::uint32_t d = 0; d < kSize; ++d)
          product += weights[i / kGroup * kInputs + (kv_head * kGroup + i % kGroup) * kSize + d] *
                     rows.value(t, d);
        expected += std::fabs(product);
      }
      CHECK(static_cast<double>(features[t]) == Approx(expected).epsilon(1e-5));
    }
  }
  const FeaturesByName feature_values{{"value_out_norm1", {7}}};
  CHECK(*FeatureMaker(names, kSize).append(rows.from(0, 1), &feature_values, 0) == 7);
}

TEST_CASE("a feature that is not computed is read from the given values of the append's tokens") {
  const Rows rows;
  FeatureMaker maker({"score", "key_norm"}, kSize);
  const FeaturesByName feature_values{{"score", {1, 2, 3, 4, 5}}};
  const float* const features = maker.append(rows.from(0, 2), &feature_values, 3);
  CHECK(features[0] == 4);
  CHECK(features[2] == 5);
  CHECK_THROWS_AS(maker.append(rows.from(0, 2), &feature_values, 4), std::logic_error);
  CHECK_THROWS_AS(maker.append(rows.from(0, 2), nullptr, 0), std::logic_error);
}

TEST_CASE("a cache refuses tokens without the features of its policy") {
  struct FetchingSet : LiveSet {
    using LiveSet::bring_back;
    using LiveSet::LiveSet;
  } live(parse_policy("knorm"), 3, {});
  CHECK(live.features() == std::vector<std::string>{"key_norm"});
  CHECK_THROWS_AS(live.append(0, 1), std::logic_error);
  const float norms[] = {2, 9, 4};
  live.append(0, 3, norms);
  live.evict_to_budget(3);
  CHECK(std::vector<std::uint32_t>(live.positions().begin(), live.positions().end()) ==
        std::vector<std::uint32_t>{0, 2});
  CHECK(std::vector<float>(live.feature_values().begin(), live.feature_values().end()) ==
        std::vector<float>{2, 4});
  CHECK_THROWS_AS(live.bring_back(1, 3), std::logic_error);
  live.bring_back(1, 3, &norms[1]);
  CHECK(std::vector<float>(live.feature_values().begin(), live.feature_values().end()) ==
        std::vector<float>{2, 9, 4});
}

TEST_CASE("a policy names the features that it reads") {
  CHECK(parse_policy("feature").features == std::vector<std::string>{"value_norm"});
  const PolicySpec spec = parse_policy("feature:recent=4:name=my-score.2");
  CHECK(spec.features == std::vector<std::string>{"my-score.2"});
  CHECK(spec.text() == "feature:name=my-score.2:keep=1:sinks=0:recent=4");
  CHECK(parse_policy(spec.text()).text() == spec.text());
  CHECK_THROWS_WITH(parse_policy("feature:name=a/b"),
                    "policy feature: name: 'a/b' should be a feature's name: up to 64 letters, "
                    "digits, '_', '-' and '.'");
  CHECK_THROWS_WITH(parse_policy("feature:name=a:name=b"),
                    "policy feature: name is given twice; give it once");
  CHECK_THROWS_AS(parse_policy("knorm:name=a"), std::invalid_argument);
}
