// Features that look at many tokens: scores of papers, by the keys, values and queries of an
// append and those before it.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

enum class ScoredFeature {
  lagkv,               ///< LagKV: a token's place in its partition, by the range of the next one
  expected_attention,  ///< what queries like those so far would give the key, times the value's
                       ///< norm
  redundancy           ///< R-KV: softmax over tokens of the key's mean cosine with the others
};

std::optional<ScoredFeature> scored_feature(std::string_view name);
std::vector<std::string> scored_features();

/// Keys before RoPE and values of the tokens of an append, float32; rows are `stride` apart.
struct KeyValueRows {
  const float *k, *v;
  std::size_t stride;
  std::uint32_t tokens;
  // For scored features; null without:
  const float* q = nullptr;  ///< [group, token], before RoPE
  std::size_t q_head_stride = 0, q_stride = 0;
  std::uint32_t group = 0;
  std::span<const float> inv_freq = {};  ///< dimensions i and i + its length are turned together
  float rope_factor = 1, softmax_scale = 1;
};

/// As the papers' authors have them, and `kvlab.hf features`.
struct ScoreSettings {
  std::uint32_t sinks = 4;     ///< first tokens that are not scored
  std::uint32_t lag = 128;     ///< tokens of a partition
  std::uint32_t future = 512;  ///< positions ahead that queries are taken from
};

/// One KV head's, in float64, summed in order: equal rows give equal bits. A score is fixed by the
/// end of the token's append: lagkv is 1 of a token whose next partition is not whole by then;
/// expected_attention takes the queries as they were at the end of the last append of several.
class ScoredFeatures {
 public:
  explicit ScoredFeatures(std::uint32_t head_size, ScoreSettings settings = {})
      : dim_(head_size), settings_(settings) {}

  /// The tokens of the next append.
  void add(const KeyValueRows& rows);
  /// Those tokens' scores, each `stride` behind the last.
  void write(ScoredFeature feature, const KeyValueRows& rows, float* to, std::size_t stride);

 private:
  /// What queries to come are taken to be, of one query head.
  struct Expected {
    std::vector<double> sum, products;  // [dim], [dim, dim]: of the queries so far
    std::vector<double> mean, spread;   // turned ahead, [dim], [dim, dim]
    double largest = 0, total = 0;      // of the logits that they give the keys so far
  };

  std::uint32_t tokens() const { return static_cast<std::uint32_t>(inverse_norms_.size()); }
  /// In float64, turned to its position.
  std::vector<double> rotate_key(const KeyValueRows& rows, std::uint32_t position) const;
  void count_queries(const KeyValueRows& rows, std::uint32_t first);
  void expect(const KeyValueRows& rows);
  double logit(const Expected& expected, const std::vector<double>& key, double scale) const;
  std::vector<double> lag_scores(const KeyValueRows& rows, bool of_keys, std::uint32_t first) const;
  void write_places(const KeyValueRows& rows, std::uint32_t first, float* to, std::size_t stride);
  void write_expected(const KeyValueRows& rows, std::uint32_t first, float* to, std::size_t stride);
  void write_redundancy(std::uint32_t first, float* to, std::size_t stride) const;

  std::uint32_t dim_;
  ScoreSettings settings_;
  std::vector<float> keys_, values_;   // [token, dim], before RoPE
  std::vector<double> inverse_norms_;  // [token]: of keys
  std::vector<double> unit_sum_;       // [dim]: of the keys' directions
  std::vector<Expected> expected_;     // [group]
  std::uint32_t counted_ = 0;          // queries in their sums
};

}  // namespace kvlab
