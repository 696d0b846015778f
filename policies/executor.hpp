// Who runs which caches, beside the plain replay, which runs all: one line for each executor of the
// rule says what it knows of all that may be asked of a cache. What is not in the table, everybody
// knows.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"

namespace kvlab {

/// Which features a policy may read: none, those that are built in, also those that are scored or
/// that a FeatureSource brings, or those that lie beside a trace.
enum class Features { none, built_in, supplied, any };

/// Tiers of a plan that a CUDA device can hold: kernels::kMaxDeviceTiers.
inline constexpr std::size_t kMaxDeviceTiers = 8;

/// What it knows is true here; an executor that learns something turns that to true in its line
/// below, and has no other gate.
struct Executor {
  const char* name;            ///< of messages: "the CUDA decoder"
  const char* instead;         ///< who knows the rest: "--device cpu"
  bool head_budgets = false;   ///< unequal ones: of a file, pyramid()
  bool exempt_layers = false;  ///< `null` in a file
  bool shared_slots = false;   ///< ada()
  bool scope_layer = false;
  bool group_max = false;
  bool supports_tiers = false;
  std::size_t most_tiers = kMaxTiers;  ///< of one tier plan
  bool kivi = false;
  bool products = false;   ///< of a policy's rank with a feature
  bool bent_rows = false;  ///< layers with soft caps or sink logits
  Features features = Features::none;
};

/// The CPU's.
inline constexpr Executor kDecoder{.name = "a decoder",
                                   .instead = "a replay",
                                   .head_budgets = true,
                                   .exempt_layers = true,
                                   .shared_slots = true,
                                   .scope_layer = true,
                                   .group_max = true,
                                   .supports_tiers = true,
                                   .products = true,
                                   .features = Features::supplied};
/// The end-to-end evaluation there.
inline constexpr Executor kEvaluation = [] {
  Executor loop = kDecoder;
  loop.kivi = true;
  return loop;
}();
inline constexpr Executor kCudaDecoder{.name = "the CUDA decoder",
                                       .instead = "--device cpu",
                                       .head_budgets = true,
                                       .shared_slots = true,
                                       .scope_layer = true,
                                       .group_max = true,
                                       .supports_tiers = true,
                                       .most_tiers = kMaxDeviceTiers,
                                       .features = Features::built_in};
/// What kvlab.hf.evicting does with it.
inline constexpr Executor kKernelLibrary{.name = "the kernel library",
                                         .instead = "a model on the CPU",
                                         .head_budgets = true,
                                         .scope_layer = true,
                                         .group_max = true,
                                         .supports_tiers = true,
                                         .most_tiers = kMaxDeviceTiers,
                                         .features = Features::built_in};
inline constexpr Executor kCudaEvaluation{.name = "the end-to-end evaluation on CUDA",
                                          .instead = "--device cpu",
                                          .head_budgets = true,
                                          .scope_layer = true,
                                          .group_max = true,
                                          .supports_tiers = true,
                                          .most_tiers = kMaxDeviceTiers,
                                          .features = Features::built_in};
inline constexpr Executor kCudaReplay{.name = "the CUDA replay",
                                      .instead = "--device cpu",
                                      .head_budgets = true,
                                      .scope_layer = true,
                                      .group_max = true,
                                      .supports_tiers = true,
                                      .most_tiers = kMaxDeviceTiers,
                                      .features = Features::any};

/// The first feature of the policy that the executor has not; empty: it has all.
std::string feature_beyond(const Executor& executor, const PolicySpec& policy);

/// Why the executor cannot run such a cache, in one line; empty: it can.
std::string refusal(const Executor& executor, const CacheConfig& config);
/// Likewise of a layer with a soft cap or with sink logits.
std::string refusal_of_rows(const Executor& executor, bool capped, bool sinks);

/// Throws std::invalid_argument with the refusal, if there is one.
void check_held(const Executor& executor, const CacheConfig& config);
/// Likewise, also where budgets by head are of another shape than the model's.
void check_held(const Executor& executor, const ResolvedConfig& config, const CacheShape& model);

/// Whether a device holds both side by side: of one policy, one choice of features, one kind of
/// positions.
bool side_by_side(const CacheConfig& one, const CacheConfig& other);
/// Indices of configurations that are alike, at most `most` together.
std::vector<std::vector<std::size_t>> batches_of(
    std::span<const CacheConfig> configs, std::size_t most,
    const std::function<bool(const CacheConfig&, const CacheConfig&)>& alike);

}  // namespace kvlab
