#include "sim/plan/engine_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

namespace kvlab {
namespace {

constexpr std::string_view kEngines[] = {"vllm", "llama.cpp", "tensorrt-llm", "transformers"};

[[noreturn]] void refuse_windows(std::string_view engine) {
  throw std::invalid_argument(
      fmt::format("{} also quantizes layers with a sliding window, which the plan keeps in 16 bit; "
                  "use --for vllm, or leave the cache of {} in 16 bit",
                  engine, engine));
}

[[noreturn]] void refuse(std::string_view engine, const std::string& why) {
  throw std::invalid_argument(fmt::format(
      "{} {}; `kvlab plan --formats {}` makes a plan that it can run", engine, why, engine));
}

/// Returns the only format besides 16 bit that the plan uses for keys and values, or 16 bit if it
/// uses no other. Refuses plans with several formats, or with a format that is not in `known`.
const RowFormat& only_format(const std::vector<KvFormat>& layers, std::string_view engine,
                             std::initializer_list<std::string_view> known) {
  const RowFormat* only = &kRowFormats[0];
  for (const KvFormat& layer : layers) {
    if (layer.key != layer.value)
      refuse(engine,
             fmt::format("supports only one format for keys and values, not {}", layer.name()));
    if (layer.exact() || layer.key == only) continue;
    if (!only->exact())
      refuse(engine, fmt::format("supports only one format besides 16 bit, not {} and {}",
                                 only->name, layer.key->name));
    if (std::ranges::find(known, layer.key->name) == known.end())
      refuse(engine, fmt::format("does not have the format {}", layer.key->name));
    only = layer.key;
  }
  return *only;
}

std::string vllm_options(const PlanFile& plan, const std::vector<KvFormat>& layers) {
  const RowFormat& format = only_format(layers, "vllm", {"fp8_e4m3", "nvfp4"});
  if (format.exact()) return "--kv-cache-dtype auto";
  std::vector<std::string> skipped;
  for (std::size_t layer = 0; layer < layers.size(); ++layer)
    if (layers[layer].exact()) skipped.push_back(std::to_string(plan.layers[layer]));
  if (plan.has_windows) skipped.emplace_back("sliding_window");
  std::string options = fmt::format("--kv-cache-dtype {}", format.name);
  if (!skipped.empty())
    options += fmt::format(" --kv-cache-dtype-skip-layers {}", fmt::join(skipped, " "));
  return options;
}

/// Returns the format that all layers have. Refuses plans whose formats differ by layer.
const KvFormat& same_in_all(const std::vector<KvFormat>& layers, std::string_view engine) {
  for (const KvFormat& layer : layers)
    if (!(layer == layers.front()))
      refuse(engine, fmt::format("supports only the same formats in all layers, not {} and {}",
                                 layers.front().name(), layer.name()));
  return layers.front();
}

std::string llama_options(const PlanFile& plan, const std::vector<KvFormat>& layers) {
  const KvFormat& format = same_in_all(layers, "llama.cpp");
  if (plan.has_windows && !format.exact()) refuse_windows("llama.cpp");
  bool rotates = false, leaves_plain = false;
  const auto type = [&](const RowFormat& own) -> std::string_view {
    if (own.exact()) return "f16";
    if (own.encoding != Encoding::ggml && own.encoding != Encoding::ggml_min)
      refuse("llama.cpp", fmt::format("does not have the format {}", own.name));
    const bool rotated = own.rotation == Rotation::llama;
    (rotated ? rotates : leaves_plain) = true;
    return rotated ? own.name.substr(0, own.name.find("_rot")) : own.name;
  };
  // llama.cpp supports quantized values only with flash attention.
  const std::string options = fmt::format("--flash-attn on --cache-type-k {} --cache-type-v {}",
                                          type(*format.key), type(*format.value));
  if (rotates && leaves_plain)
    refuse("llama.cpp",
           fmt::format("rotates both keys and values, or neither, but {} rotates only one of them",
                       format.name()));
  return leaves_plain ? "# environment: LLAMA_ATTN_ROT_DISABLE=1\n" + options : options;
}

std::string tensorrt_options(const PlanFile& plan, const std::vector<KvFormat>& layers) {
  same_in_all(layers, "tensorrt-llm");
  const RowFormat& format = only_format(layers, "tensorrt-llm", {"fp8_e4m3", "nvfp4"});
  if (plan.has_windows && !format.exact()) refuse_windows("tensorrt-llm");
  return fmt::format("kv_cache_config:\n  dtype: {}", format.exact()              ? "auto"
                                                      : format.name == "fp8_e4m3" ? "fp8"
                                                                                  : format.name);
}

std::string transformers_options(const PlanFile& plan, const std::vector<KvFormat>& layers) {
  same_in_all(layers, "transformers");
  const RowFormat& format = only_format(layers, "transformers", {"int4_g64", "int2_g64"});
  if (format.exact()) return "DynamicCache(config=model.config)";
  if (plan.has_windows) refuse_windows("transformers");
  return fmt::format(
      "QuantizedCache(\"quanto\", model.config, nbits={}, axis_key=0, axis_value=0, "
      "q_group_size=64)",
      format.bits);
}

}  // namespace

std::string engine_options(const PlanFile& plan, std::string_view engine) {
  if (std::ranges::find(kEngines, engine) == std::end(kEngines))
    throw std::invalid_argument(
        fmt::format("--for: '{}' should be one of {}", engine, fmt::join(kEngines, ", ")));
  if (plan.centre != KeyCentre::none) refuse(engine, "does not centre keys");
  const std::vector<KvFormat> layers =
      plan.tier_plan.is_by_layer()
          ? plan.tier_plan.layers
          : std::vector(plan.layers.size(), plan.tier_plan.tiers.front().format);
  if (engine == "vllm") return vllm_options(plan, layers);
  if (engine == "llama.cpp") return llama_options(plan, layers);
  if (engine == "transformers") return transformers_options(plan, layers);
  return tensorrt_options(plan, layers);
}

}  // namespace kvlab
