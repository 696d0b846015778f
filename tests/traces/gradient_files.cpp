#include "tests/traces/gradient_files.hpp"

#include "traces/manifest.hpp"
#include "traces/shard.hpp"

namespace kvlab::test {

void write_gradients(const std::filesystem::path& directory, std::uint32_t draws,
                     const std::function<float()>& next, Span span) {
  const std::string path = (directory / kManifestFile).string();
  Manifest manifest = parse_manifest(read_text_file(path, 1'000'000), path);
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
  write_file_atomically(path, manifest_text(manifest));
}

}  // namespace kvlab::test
