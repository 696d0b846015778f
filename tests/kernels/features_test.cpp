// Compares token features computed on the device with those of FeatureMaker on the host.
#include "kernels/evict/features.hpp"

#include <bit>
#include <random>

#include "kernels/evict/eviction.hpp"
#include "policies/features/features.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/kernels/attention_reference.hpp"
#include "tests/skip.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

constexpr int kSequences = 2, kKvHeads = 3, kGroup = 3, kPairs = kSequences * kKvHeads;
constexpr std::uint32_t kHidden = 200;
constexpr int kSlots = 200;  // per pair
using Names = std::vector<std::string>;
const std::vector<Names> kNames{{"value_norm1", "key_cosine", "key_norm", "value_norm"},
                                {"value_out_norm1"},
                                {"key_norm", "value_out_norm1"}};

/// The features of several sequences' tokens, on the host and on the device.
class Features {
 public:
  Features(Type type, int head_size, Names names)
      : type_(type), dim_(static_cast<std::size_t>(head_size)), names_(std::move(names)) {
    const auto size = static_cast<std::uint32_t>(head_size);
    const std::size_t inputs = kKvHeads * kGroup * dim_;
    weights_ = random_values(type_, kHidden * inputs, random_);
    projections_ = {kHidden, kGroup, size, {}};
    projections_.add_layer(kKvHeads * kGroup, [&](std::size_t output, float* row) {
      std::copy_n(&weights_[output * inputs], inputs, row);
    });
    for (int pair = 0; pair < kPairs; ++pair) {
      makers_.emplace_back(names_, size,
                           projections_.weights(0, static_cast<std::uint32_t>(pair % kKvHeads)));
      first_slots_.push_back(pair * kSlots + 1);
    }
    values_.resize((kPairs * kSlots + 1) * dim_);
    expected_.resize((kPairs * kSlots + 1) * names_.size());
    next_.resize(kPairs);
    features_ = std::make_unique<DeviceArray<float>>(expected_.size());
    unit_keys_ = std::make_unique<DeviceArray<float>>(kPairs * dim_);
  }

  /// Appends `tokens` tokens to each sequence that is not idle.
  void append(int tokens, const std::vector<bool>& idle = {}) {
    const std::size_t row =
        kKvHeads * dim_ + 16;  // with 16 more elements, as if a row also had queries
    std::vector<float> keys =
        random_values(type_, static_cast<std::size_t>(kSequences * tokens) * row, random_);
    std::fill_n(keys.begin(), dim_, 0.0f);  // a key of norm 0
    const std::vector<std::int32_t> slots = next_;
    std::vector<std::uint32_t> now(kSequences, 7);
    for (std::size_t pair = 0; pair < kPairs; ++pair) {
      const std::size_t sequence = pair / kKvHeads;
      if (!idle.empty() && idle[sequence]) {
        now[sequence] = kIdle;
        continue;
      }
      const auto slot = static_cast<std::size_t>(first_slots_[pair] + next_[pair]);
      const auto count = static_cast<std::size_t>(tokens);
      std::ranges::copy(random_values(type_, count * dim_, random_),
                        values_.begin() + static_cast<std::ptrdiff_t>(slot * dim_));
      std::vector<float> k, v(&values_[slot * dim_], &values_[slot * dim_] + count * dim_);
      for (std::size_t t = 0; t < count; ++t) {
        const float* const key = &keys[(sequence * count + t) * row + pair % kKvHeads * dim_];
        k.insert(k.end(), key, key + dim_);
      }
      const float* const made = makers_[pair].append(
          {k.data(), v.data(), dim_, static_cast<std::uint32_t>(tokens)}, nullptr, 0);
      std::copy_n(made, count * names_.size(), &expected_[slot * names_.size()]);
      next_[pair] += tokens;
    }
    launch(encode(type_, keys), slots, now, tokens, row);
  }

  int different() const {
    const std::vector<float> features = features_->to_host();
    int different = 0;
    for (std::size_t i = 0; i < features.size(); ++i)
      different +=
          std::bit_cast<std::uint32_t>(features[i]) == std::bit_cast<std::uint32_t>(expected_[i])
              ? 0
              : 1;
    return different;
  }

 private:
  void launch(const std::vector<std::byte>& keys, const std::vector<std::int32_t>& slots,
              const std::vector<std::uint32_t>& now, int tokens, std::size_t row) {
    const DeviceArray<std::byte> device_keys(keys), device_values(encode(type_, values_)),
        device_weights(encode(type_, weights_));
    const DeviceArray<std::int32_t> device_slots(slots);
    const DeviceArray<std::uint32_t> device_now(now);
    const DeviceArray<std::int64_t> device_first(first_slots_);
    FeatureArgs args{};
    args.cache = {.type = type_,
                  .sequences = kSequences,
                  .query_heads = kKvHeads * kGroup,
                  .kv_heads = kKvHeads,
                  .head_size = static_cast<int>(dim_),
                  .max_slots = kSlots,
                  .first_slot = device_first.data(),
                  .values = device_values.data()};
    args.slots = device_slots.data();
    args.tokens = tokens;
    args.now = device_now.data();
    args.keys = device_keys.data();
    args.key_row = static_cast<std::int64_t>(row);
    args.unit_keys = unit_keys_->data();
    args.to = features_->data();
    args.output = device_weights.data();
    args.hidden = kHidden;
    for (const std::string& name : names_)
      args.features[args.count++] = static_cast<kvlab_feature>(built_in_feature(name).value());
    check_cuda(make_features(args, nullptr));
    check_cuda(cudaDeviceSynchronize());
  }

  Type type_;
  std::size_t dim_;
  Names names_;
  std::mt19937 random_{3};
  std::vector<float> weights_;  // [hidden, query_head, dim]
  OutputProjections projections_;
  std::vector<FeatureMaker> makers_;
  std::vector<std::int64_t> first_slots_;
  std::vector<std::int32_t> next_;
  std::vector<float> values_, expected_;
  std::unique_ptr<DeviceArray<float>> features_, unit_keys_;
};

}  // namespace

TEST_CASE("token features on the device have the host's bits, for prompts and steps", "[gpu]") {
  if (!has_device()) return skip("no CUDA device");
  for (const Type type : {KVLAB_BF16, KVLAB_F16, KVLAB_F32})
    for (const int head_size : {64, 96, 128, 256})
      for (const Names& names : kNames) {
        INFO(names.back() << ", head size " << head_size << ", type " << static_cast<int>(type));
        Features features(type, head_size, names);
        features.append(70);
        features.append(1);
        features.append(1, {false, true});
        features.append(2, {true, false});
        features.append(33);
        features.append(1);
        CHECK(features.different() == 0);
      }
}

TEST_CASE("token features are refused before any launch if an input is missing") {
  CHECK(make_features({}, nullptr) == cudaErrorInvalidValue);
}
