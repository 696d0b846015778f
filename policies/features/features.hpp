// Features: numbers that a token gets when it is appended and that never change. Built-in features
// are computed from keys and values, scored features from many tokens (scored.hpp). Any other
// feature must be supplied.
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
#include "policies/features/built_in_names.hpp"
#include "policies/features/output_projections.hpp"
#include "policies/features/scored.hpp"

namespace kvlab {

std::vector<std::string> built_in_features();
/// The names of the built-in and scored features, "key_norm, value_norm, …", for messages.
std::string computed_feature_names();

/// Whether kvlab computes the feature. For value_out_norm1 this depends on whether the model's
/// output projections are known.
bool is_computed(std::string_view name, bool knows_projections);
/// Whether at least one of the features is computed from the output projections.
bool wants_projections(std::span<const std::string> names);

/// Whether `name` has 1 to 64 letters, digits, '_', '-' and '.'.
bool is_feature_name(std::string_view name);

/// Features of one KV head by name, each [token].
using FeaturesByName = std::map<std::string, std::vector<float>, std::less<>>;

/// Adds to `to` those features of a prompt that kvlab does not compute, for one KV head. `layer` is
/// the model's layer number.
using FeatureReader =
    std::function<void(std::uint32_t layer, std::uint32_t kv_head, FeaturesByName& to)>;

struct CacheShape;  // policies/budgets/budget.hpp

/// Supplies features that kvlab does not compute, for prompts that are known in advance.
class FeatureSource {
 public:
  virtual ~FeatureSource() = default;
  /// Returns a reader of the features `names` of the prompt with these token ids, in a model of
  /// this shape. Throws std::invalid_argument if the source has no such prompt, model or feature.
  /// The result is valid as long as this object.
  virtual FeatureReader reader_of(std::span<const std::int32_t> prompt,
                                  std::vector<std::string> names,
                                  const CacheShape& model) const = 0;
  virtual std::string xxh3() const = 0;  ///< hash of all its data
};

/// Computes the features of one KV head, append by append.
class FeatureMaker {
 public:
  /// `output`: W_o of the KV head's query heads, if known.
  FeatureMaker(std::vector<std::string> names, std::uint32_t head_size, OutputWeights output = {},
               ScoreSettings settings = {});

  /// The features of the next append's tokens, [token, names]; null if there are no names. Valid
  /// until the next call. Features that kvlab does not compute are read from `feature_values`, from
  /// index `first` on. Scored features are also read from there if it contains them. Throws
  /// std::logic_error if a feature is missing.
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
  std::optional<ScoredFeatures> scored_;  // set if a scored feature is named
  std::vector<float> unit_keys_;          // [dim]: sum over all tokens so far
  float unit_keys_norm_ = 0;
  std::vector<float> features_;  // of the last append
  std::vector<float> products_;  // [hidden]: W_o times one value
};

// Products: a policy's rank times a feature, as in `h2o*value_norm1`, is a policy too. Only the
// rank differs, so protected tokens, modifiers and budgets work as for any other policy.

/// Makes the policy whose rank is the rank of `base`, as a number, times `feature`. This feature
/// comes after the features of `base`. `name`: the product, as the user typed it. Throws
/// std::invalid_argument if `base` never evicts, is implemented by a function of the caller's
/// program or already has kMaxFeatures features, or if `feature` is not a valid name.
std::shared_ptr<const PolicyEntry> product_of(const std::shared_ptr<const PolicyEntry>& base,
                                              const std::string& name, const std::string& feature);

/// The parameters in the layout that a product's hooks take. `own`: the parameters of its base.
std::vector<std::byte> product_params(const PolicyEntry& product,
                                      const std::vector<std::byte>& own);

}  // namespace kvlab
