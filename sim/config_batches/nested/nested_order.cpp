#include <algorithm>
#include <cstring>
#include <memory>

#include "sim/config_batches/nested/nested_config_batch.hpp"

namespace kvlab {
namespace {

class PolicyOrder final : public NestedOrder {
 public:
  PolicyOrder(const ResolvedConfig& config, LiveSet::Identity identity, const HeadView& view)
      : ops_(*config.policy.entry),
        step_{.budget = config.budget_tokens,
              .seed = config.seed,
              .sequence = identity.sequence,
              .layer = identity.layer,
              .kv_head = identity.kv_head},
        params_(config.policy.packed_params()),
        states_(view.tokens * ops_.slot_bytes),
        features_(config.policy.features, view, config.appends) {}

  void rank(std::span<const std::uint32_t> positions, std::uint32_t now,
            std::span<std::uint64_t> ranks) const override {
    Step step = step_;
    step.now = now;
    step.live = static_cast<std::uint32_t>(positions.size());
    gathered_.resize(positions.size() * ops_.slot_bytes);
    for (std::size_t i = 0; i < positions.size() && ops_.slot_bytes > 0; ++i)
      std::memcpy(gathered_.data() + i * ops_.slot_bytes,
                  states_.data() + positions[i] * ops_.slot_bytes, ops_.slot_bytes);
    const std::size_t width = features_.width();
    gathered_features_.resize(positions.size() * width);
    for (std::size_t i = 0; i < positions.size() && width > 0; ++i)
      std::copy_n(features_.from(positions[i]), width, gathered_features_.data() + i * width);
    ops_.rank(gathered_.data(), {positions.data(), gathered_features_.data()}, positions.size(),
              params_.data(), step, ranks.data());
  }

  void append(std::uint32_t first, std::uint32_t count) override {
    Step step = step_;
    step.now = first;
    step.queries = count;
    for (std::uint32_t position = first; position < first + count; ++position)
      ops_.append(states_.data() + position * ops_.slot_bytes,
                  {&position, features_.from(position)}, 1, params_.data(), step);
  }

  void spend(std::uint32_t, GroupRows&) override {}
  bool wants_rows() const override { return false; }
  bool oldest_first() const override { return ops_.info.oldest_first; }

 private:
  const PolicyOps& ops_;
  Step step_;
  std::vector<std::byte> params_, states_;  // states_: [token]
  TokenFeatures features_;
  mutable std::vector<std::byte> gathered_;
  mutable std::vector<float> gathered_features_;
};

class FutureOrder final : public NestedOrder {
 public:
  explicit FutureOrder(std::vector<std::uint64_t> masses) : masses_(std::move(masses)) {}

  void rank(std::span<const std::uint32_t> positions, std::uint32_t,
            std::span<std::uint64_t> ranks) const override {
    for (std::size_t i = 0; i < positions.size(); ++i) ranks[i] = masses_[positions[i]];
  }
  void append(std::uint32_t, std::uint32_t) override {}
  void spend(std::uint32_t query, GroupRows& rows) override {
    const std::uint64_t* const given = rows.masses(query);
    for (std::uint32_t j = 0; j <= query; ++j) masses_[j] -= given[j];
  }
  bool wants_rows() const override { return true; }
  bool oldest_first() const override { return false; }

 private:
  std::vector<std::uint64_t> masses_;
};

}  // namespace

std::unique_ptr<NestedOrder> nested_order(const ResolvedConfig& config, LiveSet::Identity identity,
                                          const HeadView& view) {
  return std::make_unique<PolicyOrder>(config, identity, view);
}

std::unique_ptr<NestedOrder> future_order(std::vector<std::uint64_t> masses) {
  return std::make_unique<FutureOrder>(std::move(masses));
}

}  // namespace kvlab
