// The C interface. It checks the arguments of a call, passes its struct to the launcher, finds
// policies by name, compiles policies from headers, and stores the reason why a call was refused.
#include "kernels/kvlab.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "kernels/decode/pair_attention.hpp"
#include "kernels/evict/append.hpp"
#include "kernels/evict/features.hpp"
#include "kernels/launch_plans.hpp"
#include "kernels/library_policy.hpp"
#include "kernels/pointwise.hpp"
#include "kernels/why_not.hpp"
#include "policies/features/built_in_names.hpp"

using namespace kvlab;
using namespace kvlab::kernels;

namespace {

static_assert(sizeof(kvlab_feature_args::features) == kMaxFeatures * sizeof(kvlab_feature) &&
              KVLAB_VALUE_OUT_NORM1 == static_cast<int>(BuiltInFeature::value_out_norm1));
static_assert(KVLAB_IDLE == kIdle && UINT32_MAX == kUnlimited);
static_assert(SIZE_MAX == kNoDevice);

// Sizes of the structs that callers fill in. If a size changes (also of an embedded struct), the
// binary interface changes.
template <class... Structs>
constexpr std::array kSizes{sizeof(Structs)...};
static_assert(
    KVLAB_VERSION == 6 &&
        kSizes<kvlab_pages, kvlab_cache_view, kvlab_rule, kvlab_observation, kvlab_policy_state,
               kvlab_memory, kvlab_policy_file, kvlab_write_args, kvlab_feature_args,
               kvlab_evicting_attention_args, kvlab_row_softmax, kvlab_prefill_args,
               kvlab_observe_args, kvlab_prefix_args, kvlab_compact_args, kvlab_tier, kvlab_rope,
               kvlab_layer, kvlab_kv_cache_config, kvlab_sequence_settings, kvlab_append_chunk,
               kvlab_sequence_info> ==
            std::array<std::size_t, 22>{48,  136, 16, 24,  80, 168, 280, 216, 248, 296, 8,
                                        184, 280, 72, 424, 8,  16,  48,  240, 48,  64,  48},
    "kvlab.h: a struct has another size: raise KVLAB_VERSION_MINOR, then write it here");

const std::vector<kvlab_policy>& policies() {
  static const std::vector<kvlab_policy> list = [] {
    std::vector<kvlab_policy> all;
    for (const DevicePolicy& policy : device_policies()) all.push_back({observing_kernels(policy)});
    return all;
  }();
  return list;
}

constexpr const char* kNull = "an argument is NULL";

/// The text of kvlab_last_error(): why this thread's last call was refused.
thread_local std::string last_error;

/// Returns whether there is a reason to refuse the call, and records the reason.
bool is_refused(const char* call, const std::string& why) {
  return !why.empty() && record_error(call, cudaErrorInvalidValue, why) != cudaSuccess;
}
template <class Args>
bool is_refused(const char* call, const Args* args) {
  if (args == nullptr) return is_refused(call, std::string(kNull));
  return is_refused(call, why_not_size(*args)) || is_refused(call, why_not(*args));
}
template <class Args>
bool is_refused(const char* call, const kvlab_policy* policy, const Args* args) {
  if (policy == nullptr || args == nullptr) return is_refused(call, std::string(kNull));
  return is_refused(call, why_not_size(*args)) || is_refused(call, why_not(policy->kernels, *args));
}

/// `said` receives a description of the error.
cudaError_t compile_policy(const char* path, const kvlab_policy** policy, std::string& said) try {
  constexpr std::uintmax_t kMaxBytes = 1 << 20;
  std::error_code error;
  if (const auto bytes = std::filesystem::file_size(path, error); !error && bytes > kMaxBytes) {
    said = std::string(path) + ": is larger than 1 MiB, so it is not a policy's header";
    return cudaErrorInvalidSource;
  }
  // Reads only regular files, not pipes or devices.
  std::ifstream file(error ? "" : path, std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    said = std::string(path) + ": cannot be read";
    return cudaErrorFileNotFound;
  }
  int device = 0;
  const cudaError_t found = cudaGetDevice(&device);
  const DeviceCode code =
      code_of_header(path, text, found == cudaSuccess ? current_architecture() : 90);
  if (found != cudaSuccess) {
    said = std::string(path) + ": compiles, but cannot be loaded: " + cudaGetErrorString(found);
    return found;
  }
  auto header = std::make_unique<const HeaderPolicy>(code);
  const EvictionKernels kernels = observing_kernels(header->policy());
  *policy = new kvlab_policy{kernels, std::move(header)};
  return cudaSuccess;
} catch (const std::invalid_argument& error) {
  said = error.what();
  return cudaErrorInvalidSource;
} catch (const std::exception& error) {
  said = std::string(path) + ": " + error.what();
  return cudaErrorNotSupported;
}

/// The name in an entry of a policy's `features`: NAME, or name=NAME, where NAME is the default of
/// the setting `name`.
const char* feature_name(const char* name) {
  const char* const given = std::strchr(name, '=');
  return given == nullptr ? name : given + 1;
}

/// Fills in the sizes for a shape, which must be supported. Reads neither the block table nor the
/// strides of blocks.
void measure(const EvictionKernels& policy, const kvlab_cache_view& c, std::size_t slots,
             kvlab_numbering numbering, kvlab_memory& to) {
  const std::size_t sequences = static_cast<std::size_t>(c.sequences),
                    pairs = sequences * static_cast<std::size_t>(c.kv_heads);
  const std::size_t page = static_cast<std::size_t>(c.pages.page);
  const std::size_t blocks =
      page == 0 ? 0 : (static_cast<std::size_t>(c.max_slots) + page - 1) / page;
  const std::size_t rows = (page == 0 ? slots : pairs * blocks * page) *
                           static_cast<std::size_t>(c.head_size) * bytes_of(c.type);
  const bool unit = std::ranges::any_of(policy.features, [](const char* feature) {
    return std::string_view(feature_name(feature)) == "key_cosine";
  });
  to = {.struct_size = sizeof to,
        .keys = rows,
        .values = rows,
        .positions = slots * sizeof(std::uint32_t),
        .ages = numbering == KVLAB_CACHE_POSITIONS ? slots * sizeof(std::uint32_t) : 0,
        .states = slots * policy.slot_bytes,
        .features = slots * policy.features.size() * sizeof(float),
        .seen = policy.needs == Needs::nothing ? 0 : slots * sizeof(kvlab_observation),
        .first_slot = pairs * sizeof(std::int64_t),
        .lengths = pairs * sizeof(std::int32_t),
        .next_slots = pairs * sizeof(std::int32_t),
        .rules = pairs * sizeof(kvlab_rule),
        .evict_at = pairs * sizeof(std::uint32_t),
        .unit_keys = unit ? pairs * static_cast<std::size_t>(c.head_size) * sizeof(float) : 0,
        .params = sequences * policy.params_bytes,
        .threshold16 = sequences * sizeof(std::uint32_t),
        .seeds = sequences * sizeof(std::uint64_t),
        .sequence_ids = sequences * sizeof(std::uint32_t),
        .blocks = (c.pages.by_pair != 0 ? pairs : sequences) * blocks * sizeof(std::int32_t),
        .attention_workspace = policy.attention_workspace(c, false),
        .compact_workspace = compact_workspace(c)};
}

/// The reason why the current device cannot attend over such a cache. Empty if it can, or if there
/// is no device.
std::string why_not_here(const kvlab_cache_view& cache, kvlab_numbering numbering) {
  DeviceLimits limits;
  const cudaError_t error = device_limits(limits);
  if (error == cudaSuccess) return why_not_attention(cache, numbering, limits);
  return is_without_code(error) ? why_not_device() : "";
}
/// Records the error of a call that attends, if there is one, and returns it.
cudaError_t record_attention_error(const char* call, cudaError_t error,
                                   const kvlab_evicting_attention_args& args) {
  const bool lacks = error == cudaErrorNotSupported;
  return record_error(call, error, lacks ? why_not_here(args.cache, args.numbering) : "");
}
cudaError_t record_prefill_error(const char* call, cudaError_t error,
                                 const kvlab_prefill_args& args) {
  DeviceLimits limits;
  const bool lacks = error == cudaErrorNotSupported && device_limits(limits) == cudaSuccess;
  return record_error(call, error, lacks ? why_not_prefill(args.type, args.head_size, limits) : "");
}

/// Returns cudaSuccess if the arguments are valid.
cudaError_t check_compact_args(const char* call, const kvlab_policy* policy,
                               const kvlab_compact_args* args) {
  if (policy != nullptr && args != nullptr && args->struct_size == sizeof *args &&
      policy->kernels.weighted && args->seen != nullptr && args->weighted == 0)
    return record_error(call, cudaErrorNotSupported,
                        "weighted is 0, but the policy weighs a prompt's queries; give "
                        "kvlab_observe the weights of kvlab_policy_weights, and set weighted to 1");
  return is_refused(call, policy, args) ? cudaErrorInvalidValue : cudaSuccess;
}

}  // namespace

cudaError_t kvlab::kernels::record_error(const char* call, cudaError_t error,
                                         const std::string& why) {
  last_error.clear();
  if (error == cudaSuccess) return error;
  std::string said = why;
  if (said.empty() && is_without_code(error)) said = why_not_device();
  last_error = std::string(call) + ": " + (said.empty() ? cudaGetErrorString(error) : said);
  return error;
}

extern "C" {

int kvlab_version(void) { return KVLAB_VERSION; }

const char* kvlab_last_error(void) { return last_error.c_str(); }

const kvlab_policy* kvlab_find_policy(const char* name) {
  if (name == nullptr) return nullptr;
  for (const kvlab_policy& policy : policies())
    if (policy.kernels.name == name) return &policy;
  return nullptr;
}

cudaError_t kvlab_compile_policy(const char* path, const kvlab_policy** policy, char* log,
                                 size_t log_bytes) {
  if (path == nullptr || policy == nullptr || (log == nullptr && log_bytes > 0))
    return record_error(__func__, cudaErrorInvalidValue, kNull);
  *policy = nullptr;
  std::string said;
  const cudaError_t error = compile_policy(path, policy, said);
  if (log_bytes > 0) log[said.copy(log, log_bytes - 1)] = '\0';
  return record_error(__func__, error, said);
}

const char* kvlab_policy_name(int index) {
  if (index < 0 || static_cast<std::size_t>(index) >= policies().size()) return nullptr;
  // null-terminated, because the name is a string literal
  return policies()[static_cast<std::size_t>(index)].kernels.name.data();
}

const char* kvlab_policy_feature(const kvlab_policy* policy, int index) {
  if (policy == nullptr || index < 0) return nullptr;
  const auto features = policy->kernels.features;
  if (static_cast<std::size_t>(index) >= features.size()) return nullptr;
  return feature_name(features[static_cast<std::size_t>(index)]);
}

kvlab_needs kvlab_policy_needs(const kvlab_policy* policy) {
  if (policy == nullptr) return KVLAB_NOTHING;
  return static_cast<kvlab_needs>(policy->kernels.needs);
}

size_t kvlab_policy_slot_bytes(const kvlab_policy* policy) {
  return policy == nullptr ? 0 : policy->kernels.slot_bytes;
}

cudaError_t kvlab_find_feature(const char* name, kvlab_feature* feature) {
  if (is_refused(__func__, std::string(name == nullptr || feature == nullptr ? kNull : "")))
    return cudaErrorInvalidValue;
  const auto found = built_in_feature(name);
  if (!found)
    return record_error(__func__, cudaErrorInvalidValue,
                        std::string("'") + name +
                            "' is not a feature that this library computes; the caller has to "
                            "provide it");
  *feature = static_cast<kvlab_feature>(*found);
  return record_error(__func__, cudaSuccess);
}

size_t kvlab_policy_params_bytes(const kvlab_policy* policy) {
  return policy == nullptr ? 0 : policy->kernels.params_bytes;
}

const char* kvlab_policy_parameter(const kvlab_policy* policy, int index) {
  if (policy == nullptr || policy->kernels.param_name == nullptr || index < 0) return nullptr;
  return policy->kernels.param_name(static_cast<std::size_t>(index));
}

double kvlab_policy_default(const kvlab_policy* policy, int index) {
  if (policy == nullptr || policy->kernels.param_default == nullptr || index < 0)
    return std::numeric_limits<double>::quiet_NaN();
  return policy->kernels.param_default(static_cast<std::size_t>(index));
}

cudaError_t kvlab_policy_params(const kvlab_policy* policy, const double* values, int count,
                                void* to) {
  if (is_refused(__func__, std::string(policy == nullptr ? kNull : "")))
    return cudaErrorInvalidValue;
  // The policy's Params are doubles, one per parameter.
  const std::size_t wanted = policy->kernels.params_bytes / sizeof(double);
  const bool null = wanted > 0 && (values == nullptr || to == nullptr);
  const bool counts = count >= 0 && static_cast<std::size_t>(count) == wanted;
  if (is_refused(__func__, why_not_params(policy->kernels, count, counts)) ||
      is_refused(__func__, std::string(null ? kNull : "")))
    return cudaErrorInvalidValue;
  const std::span all(values, wanted);
  auto* const bytes = static_cast<std::byte*>(to);
  const bool written = policy->header != nullptr ? policy->header->write_params(all, bytes)
                                                 : policy->kernels.params(all, bytes);
  return written ? record_error(__func__, cudaSuccess)
                 : record_error(__func__, cudaErrorInvalidValue, why_not_values(policy->kernels));
}

int kvlab_policy_weighted(const kvlab_policy* policy) {
  return policy != nullptr && policy->kernels.weighted ? 1 : 0;
}

cudaError_t kvlab_policy_weights(const kvlab_policy* policy, const void* params, uint32_t queries,
                                 float* to, uint32_t* tail) {
  if (policy == nullptr || to == nullptr || tail == nullptr ||
      (params == nullptr && policy->kernels.params_bytes > 0))
    return record_error(__func__, cudaErrorInvalidValue, kNull);
  if (policy->header != nullptr)
    return record_error(__func__, policy->header->weigh(params, queries, to, tail));
  *tail = policy->kernels.tail(params);
  for (uint32_t age = 0; age < queries; ++age)
    to[age] = age < *tail ? policy->kernels.weight(age, params) : 0.0f;
  return record_error(__func__, cudaSuccess);
}

cudaError_t kvlab_write(const kvlab_write_args* args, cudaStream_t stream) {
  if (is_refused(__func__, args)) return cudaErrorInvalidValue;
  return record_error(__func__, rope_write({*args}, stream));
}

cudaError_t kvlab_compute_features(const kvlab_feature_args* args, cudaStream_t stream) {
  if (is_refused(__func__, args)) return cudaErrorInvalidValue;
  return record_error(__func__, make_features({*args}, stream));
}

cudaError_t kvlab_cache_memory(const kvlab_policy* policy, const kvlab_cache_view* cache,
                               int64_t slots, kvlab_numbering numbering, kvlab_memory* bytes) {
  const bool null = policy == nullptr || cache == nullptr || bytes == nullptr;
  if (is_refused(__func__, null ? kNull : why_not_size(*bytes)) ||
      is_refused(__func__, why_not_shape(*cache, slots)))
    return cudaErrorInvalidValue;
  if (const std::string why = why_not_here(*cache, numbering); !why.empty())
    return record_error(__func__, cudaErrorNotSupported, why);
  measure(policy->kernels, *cache, static_cast<std::size_t>(slots), numbering, *bytes);
  return record_error(__func__, cudaSuccess);
}

cudaError_t kvlab_compute_ages(const kvlab_cache_view* cache, cudaStream_t stream) {
  if (is_refused(__func__, cache == nullptr ? kNull : why_not_shape(*cache)))
    return cudaErrorInvalidValue;
  return record_error(__func__, fill_ages(*cache, stream));
}

size_t kvlab_evicting_attention_workspace(const kvlab_policy* policy,
                                          const kvlab_cache_view* cache) {
  if (policy == nullptr || cache == nullptr || !why_not_shape(*cache).empty()) return 0;
  return policy->kernels.attention_workspace(*cache, false);
}

cudaError_t kvlab_attend(const kvlab_policy* policy, const kvlab_evicting_attention_args* args,
                         cudaStream_t stream) {
  if (is_refused(__func__, policy, args)) return cudaErrorInvalidValue;
  return record_attention_error(__func__, policy->kernels.attend(policy->kernels, {*args}, stream),
                                *args);
}

cudaError_t kvlab_choose_victims(const kvlab_policy* policy,
                                 const kvlab_evicting_attention_args* layers, int count,
                                 cudaStream_t stream) {
  if (is_refused(__func__, policy, layers) ||
      is_refused(__func__, why_not(policy->kernels, layers, count)))
    return cudaErrorInvalidValue;
  std::array<EvictingAttentionArgs, kMaxObservedLayers> converted{};
  for (int layer = 0; layer < count; ++layer)
    converted[static_cast<std::size_t>(layer)] = {layers[layer]};
  const std::span all(converted.data(), static_cast<std::size_t>(count));
  return record_error(__func__, policy->kernels.observe(policy->kernels, all, false, stream));
}

cudaError_t kvlab_evicting_attention(const kvlab_policy* policy,
                                     const kvlab_evicting_attention_args* args,
                                     cudaStream_t stream) {
  if (is_refused(__func__, policy, args)) return cudaErrorInvalidValue;
  return record_attention_error(__func__, policy->kernels.attention({*args}, stream), *args);
}

cudaError_t kvlab_prefill_attention(const kvlab_prefill_args* args, cudaStream_t stream) {
  if (is_refused(__func__, args) || is_refused(__func__, why_not_attended(*args)))
    return cudaErrorInvalidValue;
  return record_prefill_error(__func__, prefill_attention(*args, {}, stream), *args);
}

size_t kvlab_prefill_workspace(const kvlab_prefill_args* args) {
  return args == nullptr || !why_not(*args).empty() ? 0 : prefill_workspace(*args);
}

size_t kvlab_observe_workspace(const kvlab_observe_args* args) {
  return args != nullptr && is_type(args->prefill.type) ? observe_workspace(args->prefill) : 0;
}

cudaError_t kvlab_observe(const kvlab_observe_args* args, cudaStream_t stream) {
  if (is_refused(__func__, args)) return cudaErrorInvalidValue;
  return record_prefill_error(__func__, observe_queries(*args, stream), args->prefill);
}

cudaError_t kvlab_copy_prefix(const kvlab_policy* policy, const kvlab_prefix_args* args,
                              cudaStream_t stream) {
  if (is_refused(__func__, policy, args)) return cudaErrorInvalidValue;
  if (const std::string why = why_not_shared(policy->kernels); !why.empty())
    return record_error(__func__, cudaErrorNotSupported, why);
  return record_error(__func__, copy_prefix(policy->kernels, *args, stream));
}

size_t kvlab_compact_workspace(const kvlab_cache_view* from) {
  return from == nullptr ? 0 : compact_workspace(*from);
}

cudaError_t kvlab_compact(const kvlab_policy* policy, const kvlab_compact_args* args,
                          cudaStream_t stream) {
  if (const cudaError_t error = check_compact_args(__func__, policy, args)) return error;
  return record_error(__func__, compact(policy->kernels, *args, stream));
}

cudaError_t kvlab_compute_ranks(const kvlab_policy* policy, const kvlab_compact_args* args,
                                uint64_t* ranks, cudaStream_t stream) {
  if (const cudaError_t error = check_compact_args(__func__, policy, args)) return error;
  if (is_refused(__func__, why_not_ranks(*args, ranks, 1))) return cudaErrorInvalidValue;
  return record_error(__func__, rank_by_age(policy->kernels, *args, ranks, stream));
}

cudaError_t kvlab_compact_ranked(const kvlab_policy* policy, const kvlab_compact_args* args,
                                 const uint64_t* ranks, int devices, cudaStream_t stream) {
  if (const cudaError_t error = check_compact_args(__func__, policy, args)) return error;
  if (is_refused(__func__, why_not_ranks(*args, ranks, devices))) return cudaErrorInvalidValue;
  return record_error(__func__, keep_by_ranks(policy->kernels, *args, ranks, devices, stream));
}

}  // extern "C"
