#include "traces/extras.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "traces/base/files.hpp"
#include "traces/base/split_mix.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

/// Maps 64 random bits to a uniformly distributed number in (0, 1].
double uniform(std::uint64_t bits) { return static_cast<double>((bits >> 11) + 1) * 0x1p-53; }

std::vector<std::size_t> sketch_shape(const ModelShape& shape) {
  return {std::size_t{shape.query_heads} * shape.head_size, kSketchColumns};
}

Manifest manifest_of(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  return parse_manifest(read_text_file(path, kMaxManifestBytes), path);
}

void replace_manifest(const std::filesystem::path& directory, const Manifest& manifest) {
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

}  // namespace

std::string_view name_of(Queries queries) { return queries == Queries::decode ? "decode" : "all"; }

Queries parse_queries(std::string_view text) {
  if (text == "decode") return Queries::decode;
  if (text == "all") return Queries::all;
  throw std::invalid_argument(fmt::format("queries: '{}' should be decode or all", text));
}

double sketch_normal(std::uint64_t seed, std::uint64_t index) {
  const std::uint64_t key = split_mix(seed);
  const double u = uniform(split_mix(key ^ (2 * index))),
               v = uniform(split_mix(key ^ (2 * index + 1)));
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

TraceExtras::Sketch write_sketch(const std::filesystem::path& directory, const ModelShape& shape,
                                 const OutputSketch& sketch) {
  const std::size_t layer_values =
      std::size_t{shape.query_heads} * shape.head_size * kSketchColumns;
  if (sketch.values.size() != layer_values * shape.layers)
    throw std::invalid_argument(
        fmt::format("sketch of the output projections: {} values given; {} are expected",
                    sketch.values.size(), layer_values * shape.layers));
  std::vector<std::byte> bytes(sketch.values.size() * bytes_of(Dtype::bf16));
  from_float(Dtype::bf16, sketch.values.data(), sketch.values.size(), bytes.data());
  std::vector<TensorToWrite> tensors;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    tensors.push_back({layer_tensor(shape.number(layer), "sketch"), Dtype::bf16,
                       sketch_shape(shape),
                       std::span(bytes).subspan(layer * layer_values * 2, layer_values * 2)});
  return {sketch.seed, write_safetensors(directory / kSketchFile, tensors,
                                         {{"seed", std::to_string(sketch.seed)}})};
}

std::uint64_t check_sketch(const SafetensorsFile& file, const ModelShape& shape) {
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    file.at(layer_tensor(shape.number(layer), "sketch"), Dtype::bf16, sketch_shape(shape));
  if (file.tensors().size() != shape.layers)
    throw std::runtime_error(
        fmt::format("{}: has {} tensors, but should have one for each of {} layers",
                    file.path().string(), file.tensors().size(), shape.layers));
  const auto found = file.metadata().find("seed");
  if (found == file.metadata().end()) return 0;  // then only the manifest has the seed
  const std::string& text = found->second;
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (error != std::errc{} || end != text.data() + text.size() || text.empty())
    throw std::runtime_error(fmt::format("{}: __metadata__ seed is '{}'; a number is expected",
                                         file.path().string(), text));
  return seed;
}

std::string feature_file(std::string_view name) {
  return fmt::format("column-{}.safetensors", name);
}

std::string feature_tensor(std::uint32_t layer, std::string_view name) {
  return layer_tensor(layer, fmt::format("column.{}", name));
}

bool is_trace_feature_name(std::string_view name) {
  constexpr std::size_t kLongest = 64;
  constexpr std::string_view kLetters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.";
  return !name.empty() && name.size() <= kLongest &&
         name.find_first_not_of(kLetters) == std::string_view::npos;
}

void check_feature_tensors(const SafetensorsFile& file, const ModelShape& shape,
                           std::uint32_t tokens, std::string_view name) {
  const std::size_t wanted[] = {shape.kv_heads, tokens};
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
    file.at(feature_tensor(shape.number(layer), name), Dtype::f32, wanted);
  if (file.tensors().size() != shape.layers)
    throw std::runtime_error(
        fmt::format("{}: has {} tensors, but should have one for each of {} layers",
                    file.path().string(), file.tensors().size(), shape.layers));
}

void write_feature(const std::filesystem::path& directory, const std::string& name,
                   const std::function<float(std::uint32_t, std::uint32_t, std::uint32_t)>& value) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  std::vector<std::vector<float>> layers(shape.layers);
  std::vector<TensorToWrite> tensors;
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    for (std::uint32_t head = 0; head < shape.kv_heads; ++head)
      for (std::uint32_t t = 0; t < manifest.tokens; ++t)
        layers[layer].push_back(value(layer, head, t));
    if (!std::ranges::all_of(layers[layer], [](float x) { return std::isfinite(x); }))
      throw std::invalid_argument(
          fmt::format("feature {}: layer {} has a value that is not finite, so nothing was stored",
                      name, layer));
    tensors.push_back({feature_tensor(shape.number(layer), name),
                       Dtype::f32,
                       {shape.kv_heads, manifest.tokens},
                       std::as_bytes(std::span(layers[layer]))});
  }
  auto& features = manifest.extras.features;
  if (std::erase_if(features, [&](const TraceExtras::Feature& c) { return c.name == name; }) > 0)
    // The manifest must not name a file that is being replaced.
    replace_manifest(directory, manifest);
  features.push_back({name, write_safetensors(directory / feature_file(name), tensors, {})});
  replace_manifest(directory, manifest);
}

void write_gradients(const std::filesystem::path& directory, TraceExtras::Gradients gradients,
                     const std::function<float(std::size_t)>& scale, const FillGradient& fill) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  if (std::exchange(manifest.extras.gradients, std::nullopt))
    // The manifest must not name files that are being replaced.
    replace_manifest(directory, manifest);
  try {
    for (const ShardInfo& shard : manifest.shards) {
      const std::size_t index = gradients.files.size();
      const float file_scale = scale(index);
      std::vector<TensorToWrite> tensors{{std::string(kGradientScaleTensor),
                                          Dtype::f32,
                                          {1},
                                          std::as_bytes(std::span(&file_scale, 1))}};
      std::vector<float> values(std::size_t{gradients.gradient_samples} * shape.query_heads *
                                shard.tokens * shape.head_size);
      std::vector<std::vector<std::byte>> layers(shape.layers);
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        fill(shard, layer, values);
        layers[layer].resize(values.size() * bytes_of(shape.dtype));
        from_float(shape.dtype, values.data(), values.size(), layers[layer].data());
        tensors.push_back(
            {layer_tensor(shape.number(layer), kGradientTensor),
             shape.dtype,
             {gradients.gradient_samples, shape.query_heads, shard.tokens, shape.head_size},
             layers[layer]});
      }
      const std::string name = gradient_name(index);
      gradients.files.push_back(
          {name, shard.first, shard.tokens, write_safetensors(directory / name, tensors, {})});
    }
  } catch (...) {
    std::error_code ignored;
    for (const ShardInfo& file : gradients.files)
      std::filesystem::remove(directory / file.file, ignored);
    throw;
  }
  manifest.extras.gradients = std::move(gradients);
  replace_manifest(directory, manifest);
}

void write_gradients(const std::filesystem::path& directory, std::uint32_t gradient_samples,
                     const std::function<float()>& next, Queries queries) {
  write_gradients(
      directory, {gradient_samples, 5, queries, {}},
      [](std::size_t file) { return 0.25f * static_cast<float>(file + 1); },
      [&](const ShardInfo&, std::uint32_t, std::span<float> values) {
        for (float& x : values) x = next();
      });
}

}  // namespace kvlab
