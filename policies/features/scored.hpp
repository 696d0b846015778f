// Scored features: scores from papers that depend on many tokens. They are computed from the keys,
// values and queries of an append and of all earlier appends.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kvlab {

enum class ScoredFeature {
  /// LagKV: a token's position in its partition, ordered by a score that depends on the range of
  /// keys and values in the next partition; from 0 (lowest score) to below 1.
  lagkv,
  expected_attention,  ///< expected attention to the key from queries that are distributed like
                       ///< those so far, times the value's norm
  redundancy           ///< R-KV: softmax over tokens of the key's mean cosine with the others
};

std::optional<ScoredFeature> scored_feature(std::string_view name);
std::vector<std::string> scored_features();

/// Keys before RoPE, and values, of an append's tokens, float32; rows are `stride` floats apart.
struct KeyValueRows {
  const float *k, *v;
  std::size_t stride;
  std::uint32_t tokens;
  // The next members are for scored features. If no scored feature is computed, q is null.
  const float* q = nullptr;  ///< [group, token], before RoPE
  std::size_t q_head_stride = 0, q_stride = 0;
  std::uint32_t group = 0;
  /// RoPE rotates dimensions i and i + inv_freq.size() together.
  std::span<const float> inv_freq = {};
  float rope_factor = 1, softmax_scale = 1;
};

/// The defaults are those of the papers' authors and of `kvlab.hf features`.
struct ScoreSettings {
  std::uint32_t sinks = 4;  ///< number of tokens at the start that are not scored
  std::uint32_t lag = 128;  ///< tokens per partition
  /// Number of future positions over which the rotation of queries is averaged.
  std::uint32_t future = 512;
};

/// Computes the scored features of one KV head in float64. Sums run in a fixed order, so that equal
/// rows give equal bits. A score is computed at the end of the token's append and then stays the
/// same. lagkv is 1 for a token whose next partition is incomplete at that time. expected_attention
/// uses the queries up to the end of the last append that had several tokens.
class ScoredFeatures {
 public:
  explicit ScoredFeatures(std::uint32_t head_size, ScoreSettings settings = {})
      : dim_(head_size), settings_(settings) {}

  /// Adds the tokens of the next append.
  void add(const KeyValueRows& rows);
  /// Writes the scores of those tokens, `stride` floats apart.
  void write(ScoredFeature feature, const KeyValueRows& rows, float* to, std::size_t stride);

 private:
  /// The expected future queries of one query head.
  struct Expected {
    std::vector<double> sum, products;  // [dim], [dim, dim]: sums over the queries so far
    // Mean [dim] and covariance [dim, dim] of the queries, rotated to future positions.
    std::vector<double> mean, spread;
    // `largest`: the largest logit of any key so far, under these queries. `total`: the sum of
    // exp(logit - largest) over these keys.
    double largest = 0, total = 0;
  };

  std::uint32_t tokens() const { return static_cast<std::uint32_t>(inverse_norms_.size()); }
  /// The key in float64, rotated to its position.
  std::vector<double> rotate_key(const KeyValueRows& rows, std::uint32_t position) const;
  void count_queries(const KeyValueRows& rows, std::uint32_t first);
  void expect(const KeyValueRows& rows);
  double logit(const Expected& expected, const std::vector<double>& key, double scale) const;
  std::vector<double> lag_scores(const KeyValueRows& rows, bool uses_keys,
                                 std::uint32_t first) const;
  void write_places(const KeyValueRows& rows, std::uint32_t first, float* to, std::size_t stride);
  void write_expected(const KeyValueRows& rows, std::uint32_t first, float* to, std::size_t stride);
  void write_redundancy(std::uint32_t first, float* to, std::size_t stride) const;

  std::uint32_t dim_;
  ScoreSettings settings_;
  std::vector<float> keys_, values_;   // [token, dim], before RoPE
  std::vector<double> inverse_norms_;  // [token]: of the keys' norms
  std::vector<double> unit_sum_;       // [dim]: sum of the unit keys
  std::vector<Expected> expected_;     // [group]
  std::uint32_t counted_ = 0;          // number of queries in the sums
};

}  // namespace kvlab
