// Which executor of the rule (a decoder, an evaluation or a replay) can run which caches. Below
// there is one constant per executor, which lists what it supports. The replay on the CPU supports
// everything, so it has no constant. Every executor supports everything that the struct Executor
// does not mention.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "policies/cache_config.hpp"

namespace kvlab {

/// Features that a policy may read. none: no features. built_in: the built-in features. supplied:
/// also scored features and features from a FeatureSource. any: also features that are stored with
/// a trace.
enum class Features { none, built_in, supplied, any };

/// Formats of tiers that an executor may support. kernels: the formats of the CUDA kernels. rows:
/// all formats that quantize each key and each value separately. all: also KIVI's formats.
enum class Formats { kernels, rows, all };

/// Maximum number of tiers on a CUDA device: kernels::kMaxDeviceTiers.
inline constexpr std::size_t kMaxDeviceTiers = 8;

/// What one executor supports, limited to the capabilities in which executors differ. To enable a
/// capability that another executor has, change it in the executor's constant below. refusal()
/// reads only these constants, so no check has to be changed.
struct Executor {
  const char* name;                   ///< name in messages: "the CUDA decoder"
  const char* instead;                ///< the alternative that messages recommend: "--device cpu"
  bool exempt_layers = false;         ///< layers that a budget file exempts (`null`)
  bool shared_slots = false;          ///< ada()
  std::size_t max_tiers = kMaxTiers;  ///< maximum number of tiers in one plan
  Formats formats = Formats::kernels;
  bool formats_by_layer = false;  ///< a tier plan such as 8x2-4x28
  bool centred_keys = false;      ///< centred keys of a tier plan
  bool products = false;          ///< a policy's rank times a feature
  bool order_hooks = false;       ///< the hooks of policies/order_hooks.hpp
  bool smooth_on_tiers = true;    ///< `smooth` on several tiers, if each step evicts
  Features features = Features::none;
};

/// The CPU decoder.
inline constexpr Executor kDecoder{.name = "a decoder",
                                   .instead = "a replay",
                                   .exempt_layers = true,
                                   .shared_slots = true,
                                   .formats = Formats::rows,
                                   .formats_by_layer = true,
                                   .centred_keys = true,
                                   .products = true,
                                   .order_hooks = true,
                                   .features = Features::supplied};
/// The end-to-end evaluation on the CPU.
inline constexpr Executor kEvaluation = [] {
  Executor loop = kDecoder;
  loop.formats = Formats::all;
  return loop;
}();
/// The capabilities that all executors on a CUDA device have.
constexpr Executor device_executor(const char* name, const char* instead) {
  return {.name = name,
          .instead = instead,
          .max_tiers = kMaxDeviceTiers,
          .smooth_on_tiers = false,
          .features = Features::built_in};
}
inline constexpr Executor kCudaDecoder = [] {
  Executor decoder = device_executor("the CUDA decoder", "--device cpu");
  decoder.shared_slots = true;
  decoder.formats_by_layer = true;
  decoder.centred_keys = true;
  return decoder;
}();
/// The kernel library, when kvlab.hf.evicting uses it.
inline constexpr Executor kKernelLibrary = [] {
  Executor library = device_executor("the kernel library", "a model on the CPU");
  library.formats_by_layer = true;
  return library;
}();
inline constexpr Executor kCudaEvaluation =
    device_executor("the end-to-end evaluation on CUDA", "--device cpu");
inline constexpr Executor kCudaReplay = [] {
  Executor replay = device_executor("the CUDA replay", "--device cpu");
  replay.smooth_on_tiers = true;
  replay.features = Features::any;
  return replay;
}();

/// The error message for something that no CUDA executor supports: "WHAT: runs on the CPU only,
/// because WHY; use INSTEAD". `why` may be empty.
std::string cpu_only(std::string_view what, std::string_view why = "",
                     std::string_view instead = "--device cpu");

/// The first feature of the policy that the executor does not support; empty if it supports all.
std::string feature_beyond(const Executor& executor, const PolicySpec& policy);

/// The reason why the executor cannot run this cache, in one line. Empty if it can run it.
std::string refusal(const Executor& executor, const CacheConfig& config);

/// Throws std::invalid_argument with the text of refusal(), if it is not empty.
void check_held(const Executor& executor, const CacheConfig& config);
/// Also throws std::invalid_argument if budgets by head do not match the model's shape.
void check_held(const Executor& executor, const ResolvedConfig& config, const CacheShape& model);

/// Whether a device can run both configurations at the same time, because they have the same
/// policy, selection of features and kind of positions.
bool side_by_side(const CacheConfig& one, const CacheConfig& other);
/// Divides configurations into groups of at most `max_size` and returns the indices of each group's
/// members. A configuration may join a group if `alike` is true for the group's first member and
/// this configuration.
std::vector<std::vector<std::size_t>> batches_of(
    std::span<const CacheConfig> configs, std::size_t max_size,
    const std::function<bool(const CacheConfig&, const CacheConfig&)>& alike);

}  // namespace kvlab
