// Runs a policy's probe on the host and on the device, and compares the results.
#pragma once

#include <algorithm>
#include <numeric>
#include <tuple>

#include "policies/catalogue.hpp"
#include "tests/catch.hpp"
#include "tests/device.hpp"
#include "tests/policies/policy_probe.hpp"
#include "tests/policies/sample.hpp"

namespace kvlab {

inline constexpr std::uint32_t kTokens = 1000, kSteps = 48;
inline constexpr ProtectedTokens kProtectedTokens{.sinks = 4, .recent = 100};

/// A probe's results, from the host or the device.
struct Outcome {
  std::vector<std::uint64_t> ranks;           // [step, token]
  std::vector<std::uint32_t> eviction_order;  // [step, token]
  std::vector<std::byte> slots;               // [token, slot_bytes]
  std::vector<float> weights;                 // [token], by age

  bool operator==(const Outcome&) const = default;
};

inline std::vector<Step> make_steps() {
  std::vector<Step> steps;
  std::uint32_t now = kTokens - 1;
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    steps.push_back({.now = now,
                     .budget = 128 + s,
                     .live = kTokens,
                     .queries = 1 + s % 5,
                     .seed = 42,
                     .sequence = 1,
                     .layer = s % 3,
                     .kv_head = 7});
    now += 1 + s % 5;
  }
  return steps;
}

inline std::vector<Observation> make_observations(std::span<const Step> steps) {
  std::vector<Observation> seen;
  for (const Step& step : steps)
    for (std::uint32_t i = 0; i < kTokens; ++i)
      seen.push_back(sample_observation(i, step.now, step.queries));
  return seen;
}

/// Writes to `eviction_order`, for each token, the number of tokens that are evicted before it.
inline void place(std::span<const std::uint64_t> ranks, std::uint32_t now,
                  std::span<std::uint32_t> eviction_order) {
  std::vector<std::uint32_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0u);
  std::ranges::sort(order, {}, [&](std::uint32_t i) {
    return std::tuple(kProtectedTokens.protection(i, now), ranks[i], i);
  });
  for (std::uint32_t i = 0; i < order.size(); ++i) eviction_order[order[i]] = i;
}

inline Outcome run_on_host(const PolicySpec& spec, std::span<const Step> steps,
                           std::span<const Observation> seen) {
  const PolicyEntry& entry = *spec.entry;
  const auto params = spec.packed_params();
  std::vector<std::uint32_t> indices(kTokens);
  std::iota(indices.begin(), indices.end(), 0u);
  Outcome out{.ranks = std::vector<std::uint64_t>(kSteps * kTokens),
              .eviction_order = std::vector<std::uint32_t>(kSteps * kTokens),
              .slots = std::vector<std::byte>(kTokens * entry.slot_bytes),
              .weights = {}};
  const std::vector<float> features = sample_features(0, kTokens, entry.info.feature_count());
  const Tokens tokens{indices.data(), features.data()};
  entry.append(out.slots.data(), tokens, kTokens, params.data(), steps[0]);
  for (std::uint32_t s = 0; s < kSteps; ++s) {
    const std::span ranks = std::span(out.ranks).subspan(s * kTokens, kTokens);
    entry.observe_each(out.slots.data(), &seen[s * kTokens], kTokens, params.data(), steps[s]);
    entry.rank(out.slots.data(), tokens, kTokens, params.data(), steps[s], ranks.data());
    place(ranks, steps[s].now, std::span(out.eviction_order).subspan(s * kTokens, kTokens));
  }
  const std::uint32_t tail = entry.tail(params.data());
  for (const std::uint32_t i : indices)
    out.weights.push_back(i < tail ? entry.weight(i, params.data()) : 0.0f);
  return out;
}

/// A policy's device code with its inputs and outputs in device memory.
class DeviceRun {
 public:
  DeviceRun(const kernels::DevicePolicy& policy, const PolicySpec& spec,
            std::span<const Step> steps, std::span<const Observation> seen)
      : policy_(policy),
        params_(spec.params),
        steps_(steps),
        seen_(seen),
        features_(sample_features(0, kTokens, policy.features.size())),
        slots_(kTokens * policy.slot_bytes) {}

  cudaError_t enqueue(cudaStream_t stream) const {
    const ProbeArgs run{.tokens = kTokens,
                        .steps = kSteps,
                        .step = steps_.data(),
                        .seen = seen_.data(),
                        .features = features_.data(),
                        .protected_tokens = kProtectedTokens,
                        .ranks = ranks_.data(),
                        .eviction_order = eviction_order_.data(),
                        .slots = slots_.data(),
                        .weights = weights_.data()};
    return run_probe(policy_, run, params_, stream);
  }
  Outcome take() {
    Outcome out{.ranks = ranks_.to_host(),
                .eviction_order = eviction_order_.to_host(),
                .slots = slots_.to_host(),
                .weights = weights_.to_host()};
    ranks_.clear();
    eviction_order_.clear();
    slots_.clear();
    weights_.clear();
    check_cuda(cudaDeviceSynchronize());
    return out;
  }

 private:
  const kernels::DevicePolicy& policy_;
  std::vector<double> params_;
  DeviceArray<Step> steps_;
  DeviceArray<Observation> seen_;
  DeviceArray<float> features_;
  DeviceArray<std::uint64_t> ranks_{kSteps * kTokens};
  DeviceArray<std::uint32_t> eviction_order_{kSteps * kTokens};
  DeviceArray<std::byte> slots_;
  DeviceArray<float> weights_{kTokens};
};

inline void check_equal(const Outcome& device, const Outcome& host) {
  CHECK((device.ranks == host.ranks));
  CHECK((device.eviction_order == host.eviction_order));
  CHECK((device.slots == host.slots));
  CHECK((device.weights == host.weights));
}

}  // namespace kvlab
