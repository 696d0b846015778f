#include "traces/extras_writer.hpp"

#include "traces/base/files.hpp"
#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab {
namespace {

Manifest manifest_of(const std::filesystem::path& directory) {
  const std::string path = (directory / kManifestFile).string();
  return parse_manifest(read_text_file(path, kMaxManifestBytes), path);
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
    tensors.push_back({column_tensor(layer, name),
                       Dtype::f32,
                       {shape.kv_heads, manifest.tokens},
                       std::as_bytes(std::span(layers[layer]))});
  }
  manifest.extras.columns.push_back(
      {name, write_safetensors(directory / column_file(name), tensors, {})});
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span) {
  Manifest manifest = manifest_of(directory);
  const ModelShape& shape = manifest.header.shape;
  TraceExtras::Gradients gradients{draws, 5, span, {}};
  for (const ShardInfo& shard : manifest.shards) {
    const std::size_t count =
        std::size_t{draws} * shape.query_heads * shard.tokens * shape.head_size;
    std::vector<std::vector<std::byte>> data(shape.layers);
    std::vector<TensorToWrite> tensors;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      std::vector<float> values(count);
      for (float& x : values) x = next();
      data[layer].resize(count * bytes_of(shape.dtype));
      from_float(shape.dtype, values.data(), count, data[layer].data());
      tensors.push_back({layer_tensor(layer, kGradientTensor),
                         shape.dtype,
                         {draws, shape.query_heads, shard.tokens, shape.head_size},
                         data[layer]});
    }
    const float scale = 0.25f * static_cast<float>(gradients.files.size() + 1);
    tensors.push_back(
        {std::string(kGradientScaleTensor), Dtype::f32, {1}, std::as_bytes(std::span(&scale, 1))});
    const std::string name = gradient_name(gradients.files.size());
    gradients.files.push_back(
        {name, shard.first, shard.tokens, write_safetensors(directory / name, tensors, {})});
  }
  manifest.extras.gradients = gradients;
  write_file_atomically(directory / kManifestFile, manifest_text(manifest));
}

}  // namespace kvlab
