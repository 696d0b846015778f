#include "kernels/runtime/policy_kernels.hpp"

#include <fmt/format.h>

#include <array>
#include <stdexcept>

#include "policies/embedded.hpp"

namespace kvlab {
/// kernels/runtime/std: what NVRTC lacks; and the headers of the kernels below.
std::span<const EmbeddedText> device_headers();
}  // namespace kvlab

namespace kvlab::kernels {
namespace {

constexpr const char* kSource = "policy_source.hpp";
constexpr const char *kProbe = "kvlab::run_states", *kEvict = "kvlab::kernels::evict_kernel",
                     *kObserve = "kvlab::kernels::observe_pairs",
                     *kSettle = "kvlab::kernels::settle_tokens";
constexpr std::array kKernels{kProbe, kEvict, kObserve, kSettle};

std::string instance(const char* kernel, const PolicyEntry& entry) {
  return fmt::format("{}<{}>", kernel, entry.source->type);
}

/// By the names that they are included by.
std::vector<DeviceHeader> all_headers(const PolicySource& source) {
  constexpr std::string_view kStandard = "kernels/runtime/std/";
  std::vector<DeviceHeader> headers;
  for (const auto& texts : {policy_headers(), device_headers()})
    for (const EmbeddedText& header : texts) {
      std::string_view name = header.path;
      if (name.starts_with(kStandard)) name.remove_prefix(kStandard.size());
      headers.push_back({std::string(name), std::string(header.text)});
    }
  // Its lines count as those of the file that was asked for.
  headers.push_back({kSource, fmt::format("#line 1 {}\n{}", c_literal(source.path), source.text)});
  return headers;
}

int current_architecture() {
  int device = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess)
    throw std::runtime_error(fmt::format("CUDA: no device: {}", cudaGetErrorString(error)));
  return major * 10 + minor;
}

}  // namespace

DeviceCode compile_policy_code(const PolicyEntry& entry, int architecture) {
  std::vector<std::string> instances;
  for (const char* kernel : kKernels) instances.push_back(instance(kernel, entry));
  const std::string text = fmt::format(
      "#include \"kernels/evict/policy_probe.cuh\"\n"
      "#include \"kernels/evict/plain_eviction.cuh\"\n"
      "#include \"kernels/evict/observing_attention.cuh\"\n"
      "#include \"kernels/evict/shrink.cuh\"\n"
      "#include \"{}\"\n",
      kSource);
  try {
    return compile_device_code(text, all_headers(*entry.source), instances, architecture);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(fmt::format("{}: {}", entry.source->path, error.what()));
  }
}

PolicyKernels::PolicyKernels(std::shared_ptr<const PolicyEntry> entry)
    : entry_(std::move(entry)), code_(compile_policy_code(*entry_, current_architecture())) {}

const void* PolicyKernels::kernel(const char* name) const {
  return code_.kernel(instance(name, *entry_));
}

EvictionKernels PolicyKernels::described(const char* name) const {
  return {.name = entry_->info.name,
          .needs = entry_->info.needs,
          .oldest_first = entry_->info.oldest_first,
          .slot_bytes = entry_->slot_bytes,
          .params_bytes = entry_->params_bytes,
          .params = entry_->write_params,
          .kernel = kernel(name),
          .attention_workspace = nullptr,
          .attend = nullptr,
          .observe = nullptr};
}

EvictionKernels PolicyKernels::observing() const { return observing_kernels(described(kObserve)); }

EvictionKernels PolicyKernels::plain() const { return plain_kernels(described(kEvict)); }

AdmissionPolicy PolicyKernels::admission() const {
  return {.name = entry_->info.name,
          .slot_bytes = entry_->slot_bytes,
          .params_bytes = entry_->params_bytes,
          .weighted = entry_->info.weighted,
          .kernel = kernel(kSettle)};
}

DeviceProbe PolicyKernels::probe() const {
  return {.name = entry_->info.name,
          .slot_bytes = entry_->slot_bytes,
          .params_bytes = entry_->params_bytes,
          .params = entry_->write_params,
          .kernel = kernel(kProbe)};
}

}  // namespace kvlab::kernels
