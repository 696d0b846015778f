// Features: numbers that a token brings when it is appended and that never change. Some are built
// in, computed from keys and values; any other has to come from elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "policies/entry.hpp"
#include "policies/features/built_in.hpp"
#include "policies/features/output_projections.hpp"
#include "policies/features/scored.hpp"

namespace kvlab {
std::optional<BuiltInFeature> built_in_feature(std::string_view name);
std::vector<std::string> built_in_features();
/// Built in, or scored: "key_norm, value_norm, …", for messages.
std::string computed_feature_names();

/// Whether a feature is computed, where the model's output projections are known, or are not.
bool is_computed(std::string_view name, bool knows_projections);
/// Whether one of the features is computed from the output projections.
bool wants_projections(std::span<const std::string> names);

/// Up to 64 letters, digits, '_', '-' and '.'.
bool is_feature_name(std::string_view name);

/// Features of one KV head by name, [token].
using FeaturesByName = std::map<std::string, std::vector<float>, std::less<>>;

/// Adds to a KV head's features those of a prompt that are not computed; `layer` as the model
/// counts.
using BringFeatures =
    std::function<void(std::uint32_t layer, std::uint32_t kv_head, FeaturesByName& to)>;

struct CacheShape;  // policies/budgets/budget.hpp

/// Features that are not computed, of prompts that are known beforehand.
class FeatureSource {
 public:
  virtual ~FeatureSource() = default;
  /// The features `names` of the prompt that has these ids, in a model of such heads. Throws
  /// std::invalid_argument where it knows no such prompt, model or feature. Lives as long as this.
  virtual BringFeatures of(std::span<const std::int32_t> prompt, std::vector<std::string> names,
                           const CacheShape& model) const = 0;
  virtual std::string xxh3() const = 0;  ///< of all that it brings
};

/// The features of one KV head, append by append.
class FeatureMaker {
 public:
  /// `output`: of the KV head's query heads, where it is known.
  FeatureMaker(std::vector<std::string> names, std::uint32_t head_size, OutputWeights output = {},
               ScoreSettings settings = {});

  /// What the next append's tokens bring, [token, names]; null where there are no names. Valid
  /// until the next call. What is not computed is taken from `brought`, where the append begins
  /// at `first`, and so is a scored feature that is there. Throws std::logic_error where it is not.
  const float* append(const KeyValueRows& rows, const FeaturesByName* feature_values,
                      std::size_t first);

 private:
  const float* find_feature(const std::string& name, const FeaturesByName* feature_values,
                            std::size_t end) const;
  void add_unit_keys(const KeyValueRows& rows);
  float compute(BuiltInFeature feature, const float* key, const float* value);
  float output_norm(const float* value);

  std::vector<std::string> names_;
  std::uint32_t head_size_;
  OutputWeights output_;
  bool wants_direction_ = false;
  std::optional<ScoredFeatures> scored_;  // where one is named
  std::vector<float> unit_keys_;          // [dim]: their sum, over all tokens so far
  float unit_keys_norm_ = 0;
  std::vector<float> features_;  // of the last append
  std::vector<float> products_;  // [hidden]: of one value
};

// A policy's rank times a feature: `h2o*value_norm1`, a policy of its own. What one token's rank
// is, and nothing else, so protected tokens, modifiers and budgets do as they do with any other.

/// `base` with its rank, as a number, times `feature`, behind its own features. `name`: both, as
/// written. Throws std::invalid_argument: `base` never evicts, is a function of a program's, or has
/// no room for a feature; `feature` is no name.
std::shared_ptr<const PolicyEntry> product_of(const std::shared_ptr<const PolicyEntry>& base,
                                              const std::string& name, const std::string& feature);

/// The parameters as a product's hooks take them. `own`: as those of its base do.
std::vector<std::byte> product_params(const PolicyEntry& product,
                                      const std::vector<std::byte>& own);

}  // namespace kvlab
