#include "kernels/runtime/policy_kernels.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "kernels/runtime/code_cache.hpp"
#include "policies/embedded.hpp"
#include "policies/policy_struct.hpp"

namespace kvlab {
/// The texts of the headers that the kernels below include, and of the headers in
/// kernels/runtime/std, which replace standard headers that NVRTC does not have.
std::span<const EmbeddedText> device_headers();
}  // namespace kvlab

namespace kvlab::kernels {
namespace {

constexpr const char* kSource = "policy_source.hpp";
constexpr const char *kProbe = "kvlab::run_states<kvlab::ThePolicy>",
                     *kEvict = "kvlab::kernels::evict_kernel<kvlab::ThePolicy>",
                     *kObserve = "kvlab::kernels::observe_pairs<kvlab::ThePolicy>",
                     *kSettle = "kvlab::kernels::settle_tokens<kvlab::ThePolicy>",
                     *kWeigh = "kvlab::kernels::weigh_queries<kvlab::ThePolicy>",
                     *kDescription = "kvlab_policy_description";

/// Returns null if the registry has no such policy.
const DevicePolicy* find_registered(const PolicyEntry& entry) {
  const auto& all = device_policies();
  const auto found = std::ranges::find(all, std::string_view(entry.info.name), &DevicePolicy::name);
  return found == all.end() ? nullptr : &*found;
}

/// All headers, under the names by which programs include them.
std::vector<DeviceHeader> all_headers(const PolicySource* source) {
  constexpr std::string_view kStandard = "kernels/runtime/std/";
  std::vector<DeviceHeader> headers;
  for (const auto& texts : {policy_headers(), device_headers()})
    for (const EmbeddedText& header : texts) {
      std::string_view name = header.path;
      if (name.starts_with(kStandard)) name.remove_prefix(kStandard.size());
      headers.push_back({std::string(name), std::string(header.text)});
    }
  // #line makes the compiler report the line numbers of the source file.
  if (source)
    headers.push_back(
        {kSource, fmt::format("#line 1 {}\n{}", c_literal(source->path), source->text)});
  return headers;
}

/// A program that includes the headers `own` and names the policy's struct kvlab::ThePolicy.
DeviceProgram program_of(const PolicyEntry& entry, std::span<const char* const> own,
                         std::vector<std::string> kernels, int architecture) {
  const PolicySource* const source = entry.source.get();
  const DevicePolicy* const known = source ? nullptr : find_registered(entry);
  if (!source && !known)
    throw std::invalid_argument(fmt::format(
        "policy {}: cannot run on CUDA, because it has no C++ header that can be compiled for it",
        entry.info.name));
  std::string text;
  for (const char* header : own) text += fmt::format("#include \"{}\"\n", header);
  text += source ? fmt::format("#include \"{}\"\n", kSource)
                 : fmt::format("#include \"policies/{}\"\n", known->header);
  text += fmt::format("namespace kvlab {{\nusing ThePolicy = {};\n}}\n",
                      source ? source->type : known->type);
  return {text, all_headers(source), std::move(kernels), architecture};
}

std::string walk_name(const WalkVariant& variant) {
  constexpr const char* kTypes[] = {"__nv_bfloat16", "__half", "float"};  // indexed by Type
  constexpr const char* kTokens[] = {"ExactTokens", "CachePositionTokens", "TieredTokens"};
  return fmt::format(
      "kvlab::kernels::walk_caches<kvlab::ThePolicy, {}, {}, kvlab::kernels::{}<{}, {}>>",
      variant.head_groups, variant.largest, kTokens[static_cast<int>(variant.tokens)],
      variant.in_shared, kTypes[static_cast<int>(variant.type)]);
}

}  // namespace

bool has_text(const PolicyEntry& entry) { return entry.source || find_registered(entry); }

DeviceProgram eviction_program(const PolicyEntry& entry, int architecture) {
  return program_of(
      entry,
      std::array{"kernels/evict/policy_probe.cuh", "kernels/evict/plain_eviction.cuh",
                 "kernels/evict/observing_attention.cuh", "kernels/evict/compact.cuh"},
      {kProbe, kEvict, kObserve, kSettle}, architecture);
}

DeviceProgram walk_program(const PolicyEntry& entry, const WalkVariant& variant, int architecture) {
  return program_of(entry, std::array{"kernels/replay/walk.cuh"}, {walk_name(variant)},
                    architecture);
}

DeviceCode code_of(const DeviceProgram& program, const PolicyEntry& entry) {
  try {
    return CodeCache().code_of(program);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(
        fmt::format("{}: {}", entry.source ? entry.source->path : entry.info.name, error.what()));
  }
}

PolicyKernels::PolicyKernels(std::shared_ptr<const PolicyEntry> entry)
    : entry_(std::move(entry)),
      code_(code_of(eviction_program(*entry_, current_architecture()), *entry_)),
      policy_{.name = entry_->info.name,
              .needs = entry_->info.needs,
              .evicts = entry_->info.evicts,
              .oldest_first = entry_->info.oldest_first,
              .weighted = entry_->info.weighted,
              .rank_type = entry_->rank_type,
              .features = std::span(entry_->info.features).first(entry_->info.feature_count()),
              .slot_bytes = entry_->slot_bytes,
              .params_bytes = entry_->params_bytes,
              .params = entry_->write_params,
              .weight = entry_->weight,
              .tail = entry_->tail,
              .header = {},
              .type = {},
              .observe_pairs = code_.kernel(kObserve),
              .evict = code_.kernel(kEvict),
              .settle_tokens = code_.kernel(kSettle),
              .run_states = code_.kernel(kProbe)} {}

DeviceCode code_of_header(const std::string& path, const std::string& given, int architecture) {
  const std::string text = current_header(given);
  const PolicyStruct found = find_policy_struct(text, path);
  PolicyEntry entry{};
  entry.source = std::make_shared<const PolicySource>(
      PolicySource{.path = path, .text = text, .xxh3 = {}, .type = found.name});
  DeviceProgram program =
      program_of(entry,
                 std::array{"kernels/evict/observing_attention.cuh", "kernels/evict/compact.cuh",
                            "kernels/evict/policy_description.hpp",
                            "kernels/evict/weigh_queries.cuh", "policies/order_hooks.hpp"},
                 {kObserve, kSettle, kWeigh}, architecture);
  // The #line directive makes a failed check report the line of the struct in the header.
  program.text += fmt::format(
      "#line {} {}\nstatic_assert(kvlab::check_policy<kvlab::ThePolicy>());"
      "static_assert(!kvlab::hooks::HasEvicted<kvlab::ThePolicy> &&"
      " !kvlab::hooks::HasReorder<kvlab::ThePolicy>,"
      " \"the hooks of policies/order_hooks.hpp run on the CPU only\");\n"
      "#line 1 \"policy.cu\"\n"
      "extern \"C\" __device__ kvlab::kernels::PolicyDescription {} =\n"
      "    kvlab::kernels::describe<kvlab::ThePolicy>();\n",
      found.line, c_literal(path), kDescription);
  return code_of(program, entry);
}

HeaderPolicy::HeaderPolicy(const DeviceCode& code) : code_(code), weigh_(code_.kernel(kWeigh)) {
  code_.read(kDescription, &about_, sizeof about_);
  std::ranges::transform(about_.features, features_.begin(), [](const auto& name) { return name; });
  policy_ = {.needs = about_.needs,
             .evicts = about_.evicts,
             .oldest_first = about_.oldest_first,
             .weighted = about_.weighted,
             .rank_type = about_.rank_type,
             .features = std::span<const char* const>(features_).first(about_.feature_count),
             .slot_bytes = about_.slot_bytes,
             .params_bytes = about_.param_count * sizeof(double),
             .observe_pairs = code_.kernel(kObserve),
             .settle_tokens = code_.kernel(kSettle)};
}

bool HeaderPolicy::write_params(std::span<const double> values, std::byte* to) const {
  for (std::size_t i = 0; i < about_.param_count; ++i)
    if (!in_range(values[i], about_.min_values[i], about_.max_values[i])) return false;
  for (std::size_t i = 0; i < about_.param_count; ++i)
    std::memcpy(to + i * sizeof(double), &values[about_.param_of[i]], sizeof(double));
  return true;
}

cudaError_t HeaderPolicy::weigh(const void* params, std::uint32_t queries, float* to,
                                std::uint32_t* tail) const {
  constexpr unsigned kThreads = 128;
  double own[PolicyDescription::kMaxParams] = {};
  if (policy_.params_bytes > 0) std::memcpy(own, params, policy_.params_bytes);
  std::uint32_t* made = nullptr;
  cudaError_t error = cudaMalloc(&made, (std::size_t{queries} + 1) * sizeof *made);
  if (error != cudaSuccess) return error;
  void* args[] = {own, &queries, &made};
  error = cudaLaunchKernel(weigh_, dim3(queries / kThreads + 1), dim3(kThreads), args, 0, nullptr);
  if (error == cudaSuccess) error = cudaMemcpy(tail, made, sizeof *tail, cudaMemcpyDeviceToHost);
  if (error == cudaSuccess)
    error = cudaMemcpy(to, made + 1, queries * sizeof *to, cudaMemcpyDeviceToHost);
  cudaFree(made);
  return error;
}

}  // namespace kvlab::kernels
