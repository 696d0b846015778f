#include "policies/features/features.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "policies/features/feature_sums.hpp"

namespace kvlab {
namespace {

constexpr std::size_t kLongestName = 64;

/// Wraps an array as the function that policies/features/feature_sums.hpp expects.
auto reader(const float* x) {
  return [x](std::uint32_t d) { return x[d]; };
}

float norm(const float* x, std::uint32_t size) {
  return std::sqrt(sum_of_squares(size, reader(x)));
}

}  // namespace

std::vector<std::string> built_in_features() {
  return {std::begin(kBuiltInFeatures), std::end(kBuiltInFeatures)};
}

std::string computed_feature_names() {
  return fmt::format("{}, {}", fmt::join(built_in_features(), ", "),
                     fmt::join(scored_features(), ", "));
}

bool is_computed(std::string_view name, bool knows_projections) {
  if (scored_feature(name)) return true;
  const auto feature = built_in_feature(name);
  return feature && (knows_projections || feature != BuiltInFeature::value_out_norm1);
}

bool wants_projections(std::span<const std::string> names) {
  return std::ranges::any_of(names, [](const std::string& name) {
    return built_in_feature(name) == BuiltInFeature::value_out_norm1;
  });
}

bool is_feature_name(std::string_view name) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !name.empty() && name.size() <= kLongestName && std::ranges::all_of(name, fits);
}

FeatureMaker::FeatureMaker(std::vector<std::string> names, std::uint32_t head_size,
                           OutputWeights output, ScoreSettings settings)
    : names_(std::move(names)), head_size_(head_size), output_(output) {
  for (const std::string& name : names_) {
    wants_direction_ |= built_in_feature(name) == BuiltInFeature::key_cosine;
    if (scored_feature(name) && !scored_) scored_.emplace(head_size_, settings);
  }
  if (wants_direction_) unit_keys_.resize(head_size_);
}

const float* FeatureMaker::append(const KeyValueRows& rows, const FeaturesByName* feature_values,
                                  std::size_t first) {
  if (names_.empty()) return nullptr;
  if (wants_direction_) add_unit_keys(rows);
  if (scored_) scored_->add(rows);
  const std::size_t width = names_.size();
  features_.resize(rows.tokens * width);
  for (std::size_t c = 0; c < width; ++c) {
    const auto feature =
        is_computed(names_[c], output_.by_input) ? built_in_feature(names_[c]) : std::nullopt;
    const float* const supplied =
        feature ? nullptr : find_feature(names_[c], feature_values, first + rows.tokens);
    if (!feature && !supplied) {
      scored_->write(scored_feature(names_[c]).value(), rows, features_.data() + c, width);
      continue;
    }
    for (std::size_t i = 0; i < rows.tokens; ++i)
      features_[i * width + c] =
          feature ? compute(*feature, rows.k + i * rows.stride, rows.v + i * rows.stride)
                  : supplied[first + i];
  }
  return features_.data();
}

/// The feature's values for at least the first `end` tokens; null for a scored feature that is not
/// supplied.
const float* FeatureMaker::find_feature(const std::string& name,
                                        const FeaturesByName* feature_values,
                                        std::size_t end) const {
  const auto found = feature_values ? feature_values->find(name) : FeaturesByName::const_iterator{};
  if (feature_values && found != feature_values->end() && found->second.size() >= end)
    return found->second.data();
  if (scored_feature(name)) return nullptr;
  throw std::logic_error(fmt::format("feature {}: is neither computed nor given", name));
}

/// Adds the unit keys of `rows` to their sum. key_cosine needs only the sum and not the mean,
/// because a cosine does not depend on the length of the vectors.
void FeatureMaker::add_unit_keys(const KeyValueRows& rows) {
  for (std::size_t i = 0; i < rows.tokens; ++i) {
    const float* const key = rows.k + i * rows.stride;
    const float length = norm(key, head_size_);
    for (std::uint32_t d = 0; length > 0 && d < head_size_; ++d) unit_keys_[d] += key[d] / length;
  }
  unit_keys_norm_ = norm(unit_keys_.data(), head_size_);
}

float FeatureMaker::compute(BuiltInFeature feature, const float* key, const float* value) {
  switch (feature) {
    case BuiltInFeature::key_norm:
      return norm(key, head_size_);
    case BuiltInFeature::value_norm:
      return norm(value, head_size_);
    case BuiltInFeature::value_norm1:
      return sum_of_magnitudes(head_size_, reader(value));
    case BuiltInFeature::key_cosine:
      return cosine_from(sum_of_products(head_size_, reader(key), reader(unit_keys_.data())),
                         norm(key, head_size_), unit_keys_norm_);
    case BuiltInFeature::value_out_norm1:
      return output_norm(value);
  }
  throw std::logic_error("an unknown feature");
}

/// Computes all outputs at the same time for speed. Each output is summed in index order, as in
/// sum_of_products().
float FeatureMaker::output_norm(const float* value) {
  const std::size_t hidden = output_.hidden;
  const float* weights = output_.by_input;
  float sum = 0;
  for (std::uint32_t head = 0; head < output_.group; ++head) {
    products_.assign(hidden, 0.0f);
    for (std::uint32_t d = 0; d < head_size_; ++d, weights += hidden)
      for (std::size_t i = 0; i < hidden; ++i) products_[i] += weights[i] * value[d];
    sum += sum_of_magnitudes(output_.hidden, reader(products_.data()));
  }
  return sum;
}

namespace {

constexpr std::size_t kPointer = sizeof(void*);

/// The layout of a product's `params`: a pointer to the base policy's hooks, then the base policy's
/// parameters.
struct Base {
  const PolicyOps* ops = nullptr;
  const std::byte* params;

  explicit Base(const void* packed) : params(static_cast<const std::byte*>(packed) + kPointer) {
    std::memcpy(&ops, packed, kPointer);
  }
  std::size_t features() const { return ops->info.feature_count(); }
};

/// The tokens that are passed to the base policy of a product `base*feature`. They lack the last
/// feature, by which the product multiplies the ranks of the base policy.
class OwnTokens {
 public:
  OwnTokens(const Tokens& tokens, std::size_t count, std::size_t own)
      : positions_(tokens.positions) {
    for (std::size_t i = 0; own > 0 && i < count; ++i)
      features_.insert(features_.end(), tokens.features + i * (own + 1),
                       tokens.features + i * (own + 1) + own);
  }
  Tokens tokens() const { return {positions_, features_.empty() ? nullptr : features_.data()}; }

 private:
  const std::uint32_t* positions_;
  std::vector<float> features_;
};

void append(void* slots, Tokens tokens, std::size_t count, const void* params, const Step& step) {
  const Base base(params);
  const OwnTokens own(tokens, count, base.features());
  base.ops->append(slots, own.tokens(), count, base.params, step);
}

void observe(void* slots, const Seen& seen, std::size_t count, const void* params,
             const Step& step) {
  const Base base(params);
  base.ops->observe(slots, seen, count, base.params, step);
}

void observe_each(void* slots, const Observation* seen, std::size_t count, const void* params,
                  const Step& step) {
  const Base base(params);
  base.ops->observe_each(slots, seen, count, base.params, step);
}

RankType rank(const void* slots, Tokens tokens, std::size_t count, const void* params,
              const Step& step, std::uint64_t* ranks) {
  const Base base(params);
  const std::size_t own = base.features();
  const RankType type = base.ops->rank(slots, OwnTokens(tokens, count, own).tokens(), count,
                                       base.params, step, ranks);
  for (std::size_t i = 0; i < count; ++i)
    ranks[i] = rank_key(rank_number(type, ranks[i]) *
                        static_cast<double>(tokens.features[i * (own + 1) + own]));
  return RankType::real;
}

std::size_t find_min_rank(const void* slots, Tokens tokens, std::size_t begin, std::size_t end,
                          const void* params, const Step& step) {
  const Base base(params);
  std::vector<std::uint64_t> ranks(end - begin);
  rank(static_cast<const std::byte*>(slots) + begin * base.ops->slot_bytes,
       {tokens.positions + begin, tokens.features + begin * (base.features() + 1)}, ranks.size(),
       params, step, ranks.data());
  return begin + static_cast<std::size_t>(std::ranges::min_element(ranks) - ranks.begin());
}

float weight(std::uint32_t age, const void* params) {
  const Base base(params);
  return base.ops->weight(age, base.params);
}

std::uint32_t tail(const void* params) {
  const Base base(params);
  return base.ops->tail(base.params);
}

/// Owns the strings that the description of a product points to.
struct Texts {
  std::shared_ptr<const PolicyEntry> base;
  std::string name, feature;
};

}  // namespace

std::shared_ptr<const PolicyEntry> product_of(const std::shared_ptr<const PolicyEntry>& base,
                                              const std::string& name, const std::string& feature) {
  const PolicyInfo& own = base->info;
  const auto refuse = [&](const std::string& why) {
    throw std::invalid_argument(fmt::format("policy {}: {}", name, why));
  };
  if (!own.evicts) refuse(fmt::format("{} never evicts, so it ranks nothing", own.name));
  if (base->host)
    refuse(fmt::format("{} is a Python function, which can multiply its ranks itself", own.name));
  if (base->has_order_hooks())
    refuse(fmt::format(
        "{} has hooks of policies/order_hooks.hpp, and a product changes the eviction order",
        own.name));
  if (!is_feature_name(feature))
    refuse("a feature's name should follow the *, as in h2o*value_norm");
  if (own.feature_count() == kMaxFeatures)
    refuse(fmt::format("{} has {} features already, which is the maximum", own.name, kMaxFeatures));
  const auto texts = std::make_shared<const Texts>(Texts{base, name, feature});
  auto product = std::make_shared<PolicyEntry>(*base);
  product->info.name = texts->name.c_str();
  product->info.oldest_first = false;
  product->info.features[own.feature_count()] = texts->feature.c_str();
  product->rank_type = RankType::real;
  product->append = append;
  product->observe = observe;
  product->observe_each = observe_each;
  product->rank = rank;
  product->find_min_rank = find_min_rank;
  product->weight = weight;
  product->tail = tail;
  product->factored = std::shared_ptr<const PolicyEntry>(texts, base.get());
  return product;
}

std::vector<std::byte> product_params(const PolicyEntry& product,
                                      const std::vector<std::byte>& own) {
  const PolicyOps* const ops = product.factored.get();
  std::vector<std::byte> packed(kPointer + own.size());
  std::memcpy(packed.data(), &ops, kPointer);
  std::ranges::copy(own, packed.begin() + kPointer);
  return packed;
}

}  // namespace kvlab
