// Which executor of the rule can run which caches. The table below has one line per executor, which
// lists what it supports. The plain replay supports everything, so it has no line. What the table
// does not mention, every executor supports.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"

namespace kvlab {

/// Features that a policy may read. none: no features. built_in: the built-in ones. supplied: also
/// scored ones and those from a FeatureSource. any: also those stored with a trace.
enum class Features { none, built_in, supplied, any };

/// Formats of tiers that an executor may support. kernels: those that the kernels have. rows: all
/// that quantize each key and each value by itself. all: also KIVI's.
enum class Formats { kernels, rows, all };

/// Maximum number of tiers on a CUDA device: kernels::kMaxDeviceTiers.
inline constexpr std::size_t kMaxDeviceTiers = 8;

/// What one executor supports, as far as executors differ. To enable a new capability, set it to
/// true in the executor's line below. There is no other check.
struct Executor {
  const char* name;                   ///< name in messages: "the CUDA decoder"
  const char* instead;                ///< the alternative that messages recommend: "--device cpu"
  bool exempt_layers = false;         ///< `null` in a budget file
  bool shared_slots = false;          ///< ada()
  std::size_t max_tiers = kMaxTiers;  ///< maximum number of tiers in one plan
  Formats formats = Formats::kernels;
  bool formats_by_layer = false;  ///< a tier plan such as 8x2-4x28
  bool centre = false;            ///< centred keys of a tier plan
  bool products = false;          ///< a policy's rank times a feature
  Features features = Features::none;
};

/// The CPU decoder.
inline constexpr Executor kDecoder{.name = "a decoder",
                                   .instead = "a replay",
                                   .exempt_layers = true,
                                   .shared_slots = true,
                                   .formats = Formats::rows,
                                   .formats_by_layer = true,
                                   .centre = true,
                                   .products = true,
                                   .features = Features::supplied};
/// The end-to-end evaluation on the CPU.
inline constexpr Executor kEvaluation = [] {
  Executor loop = kDecoder;
  loop.formats = Formats::all;
  return loop;
}();
/// What every executor on a CUDA device supports.
constexpr Executor device_executor(const char* name, const char* instead) {
  return {.name = name,
          .instead = instead,
          .max_tiers = kMaxDeviceTiers,
          .features = Features::built_in};
}
inline constexpr Executor kCudaDecoder = [] {
  Executor decoder = device_executor("the CUDA decoder", "--device cpu");
  decoder.shared_slots = true;
  decoder.formats_by_layer = true;
  decoder.centre = true;
  return decoder;
}();
/// The kernel library, as kvlab.hf.evicting uses it.
inline constexpr Executor kKernelLibrary = [] {
  Executor library = device_executor("the kernel library", "a model on the CPU");
  library.formats_by_layer = true;
  return library;
}();
inline constexpr Executor kCudaEvaluation =
    device_executor("the end-to-end evaluation on CUDA", "--device cpu");
inline constexpr Executor kCudaReplay = [] {
  Executor replay = device_executor("the CUDA replay", "--device cpu");
  replay.features = Features::any;
  return replay;
}();

/// The first feature of the policy that the executor does not support; empty if it supports all.
std::string feature_beyond(const Executor& executor, const PolicySpec& policy);

/// The reason why the executor cannot run this cache, in one line; empty if it can.
std::string refusal(const Executor& executor, const CacheConfig& config);

/// Throws std::invalid_argument with the refusal, if there is one.
void check_held(const Executor& executor, const CacheConfig& config);
/// Also throws if budgets by head do not match the model's shape.
void check_held(const Executor& executor, const ResolvedConfig& config, const CacheShape& model);

/// Whether a device can run both configurations at the same time, because they have the same
/// policy, selection of features and kind of positions.
bool side_by_side(const CacheConfig& one, const CacheConfig& other);
/// Groups configurations for which `alike` is true. Returns their indices, at most `most` per
/// group.
std::vector<std::vector<std::size_t>> batches_of(
    std::span<const CacheConfig> configs, std::size_t most,
    const std::function<bool(const CacheConfig&, const CacheConfig&)>& alike);

}  // namespace kvlab
