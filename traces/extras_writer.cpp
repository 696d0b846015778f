#include "traces/extras_writer.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

Manifest manifest_of(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  return parse_manifest(read_text_file(path, kMaxManifestBytes), path);
}

void replace_manifest(const std::filesystem::path& directory, const Manifest& manifest) {
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

}  // namespace

void write_column(const std::filesystem::path& directory, const std::string& name,
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
      throw std::runtime_error(
          fmt::format("layer {}: a value is not finite; nothing can be stored", layer));
    tensors.push_back({column_tensor(shape.number(layer), name),
                       Dtype::f32,
                       {shape.kv_heads, manifest.tokens},
                       std::as_bytes(std::span(layers[layer]))});
  }
  auto& columns = manifest.extras.columns;
  if (std::erase_if(columns, [&](const TraceExtras::Column& c) { return c.name == name; }) > 0)
    replace_manifest(directory, manifest);  // its file is about to be replaced
  columns.push_back({name, write_safetensors(directory / column_file(name), tensors, {})});
  replace_manifest(directory, manifest);
}

void write_gradients(const std::filesystem::path& directory, TraceExtras::Gradients gradients,
                     const std::function<float(std::size_t)>& scale, const FillGradient& fill) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  if (std::exchange(manifest.extras.gradients, std::nullopt))
    replace_manifest(directory, manifest);  // their files are about to be replaced
  try {
    for (const ShardInfo& shard : manifest.shards) {
      const std::size_t index = gradients.files.size();
      const float of_file = scale(index);
      std::vector<TensorToWrite> tensors{{std::string(kGradientScaleTensor),
                                          Dtype::f32,
                                          {1},
                                          std::as_bytes(std::span(&of_file, 1))}};
      std::vector<float> values(std::size_t{gradients.draws} * shape.query_heads * shard.tokens *
                                shape.head_size);
      std::vector<std::vector<std::byte>> layers(shape.layers);
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
        fill(shard, layer, values);
        layers[layer].resize(values.size() * bytes_of(shape.dtype));
        from_float(shape.dtype, values.data(), values.size(), layers[layer].data());
        tensors.push_back({layer_tensor(shape.number(layer), kGradientTensor),
                           shape.dtype,
                           {gradients.draws, shape.query_heads, shard.tokens, shape.head_size},
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

void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span) {
  write_gradients(
      directory, {draws, 5, span, {}},
      [](std::size_t file) { return 0.25f * static_cast<float>(file + 1); },
      [&](const ShardInfo&, std::uint32_t, std::span<float> values) {
        for (float& x : values) x = next();
      });
}

}  // namespace kvlab
